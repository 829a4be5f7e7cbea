"""decode_json: JSON to a struct, with errors that name the field and can be read by people.

msgspec decodes fast but describes faults in its own notation. Python's parser is used to find where
they are.
"""

import json
import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from midfill.errors import InvalidRequestError

T = TypeVar("T")

# msgspec writes, for instance: Expected `int`, got `str` - at `$.stop[1]`
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<part>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode JSON into a struct of type ``kind``.

    Raises:
        InvalidRequestError: it is not valid JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, str(error)) from None


def _wrong_type(message: str) -> InvalidRequestError:
    """Return the error for a message of msgspec about a field of the wrong type."""
    match = _PLACE.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").removeprefix(".")
    missing, unknown = _MISSING.match(what), _UNKNOWN.match(what)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequestError(f"{path} is missing", param=path)
    if unknown is not None:
        path = f"{path}.{unknown[1]}" if path else unknown[1]
        return InvalidRequestError(f"{path} is not a known field", param=path)
    what = what.replace("`", "").replace(" | ", " or ")
    what = what[:1].lower() + what[1:]
    if not path:
        return InvalidRequestError(f"the body has the wrong form: {what}")
    place = f"a key of {path}" if match["part"] else path
    return InvalidRequestError(f"{place}: {what}", param=path)


def _malformed(body: bytes, complaint: str) -> InvalidRequestError:
    """Return the error for bytes that are not JSON; names the field if the fault is in a value.

    Python's own parser accepts NaN, lone surrogates and, decoded with ``surrogateescape``, invalid
    UTF-8. So it returns values in which these can be found.
    """
    if not body.strip():
        return InvalidRequestError("the request has no body")
    text = body.decode(errors="surrogateescape")
    try:
        value = json.loads(text, parse_constant=_Constant)
    except RecursionError:
        return InvalidRequestError("the body is nested too deeply")
    except ValueError as error:
        valid = text.isascii() or _is_unicode(text)
        reason = str(error) if valid else "it is not valid UTF-8"
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    for path, leaf in _leaves(value):
        place, param = path or "the body", path or None
        if isinstance(leaf, _Constant):
            reason = f"must be a finite number, not {leaf}"
        elif not isinstance(leaf, str) or _is_unicode(leaf):
            continue
        elif _is_escaped(leaf):
            reason = "holds bytes that are not valid UTF-8"
        else:
            reason = "holds half a surrogate pair; send whole Unicode characters"
        return InvalidRequestError(f"{place} {reason}", param=param)
    return InvalidRequestError(f"the body is not valid JSON: {complaint}")


class _Constant(str):
    """NaN, Infinity or -Infinity in the place of a number."""


def _leaves(value: object) -> Iterator[tuple[str, object]]:
    """Yield every scalar of a JSON value with its path, such as ``messages[0].content``.

    Keys come with the path of their object, before their values.
    """
    todo: list[tuple[str, object]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict):
            yield from ((path, key) for key in item)
            children = [(f"{path}.{key}" if path else key, child) for key, child in item.items()]
            todo += reversed(children)
        elif isinstance(item, list):
            children = [(f"{path}[{index}]", child) for index, child in enumerate(item)]
            todo += reversed(children)
        else:
            yield path, item


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_escaped(text: str) -> bool:
    """Whether its surrogates stand for undecodable bytes (PEP 383) rather than for themselves."""
    return any("\udc80" <= character <= "\udcff" for character in text)
