"""Request bodies: read within a limit, decoded into a struct, every fault named by its field."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
from fastapi import Request

from midfill.errors import InvalidRequestError
from midfill.server.errors import ApiError

T = TypeVar("T")

_SCHEMAS = "#/components/schemas/{name}"
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<part>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def body_reference(kind: type[msgspec.Struct]) -> dict[str, object]:
    """What an endpoint's OpenAPI entry says of its body; ``body_schemas`` holds the schema."""
    schema = {"$ref": _SCHEMAS.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas(kinds: Sequence[type[msgspec.Struct]]) -> dict[str, object]:
    """JSON schemas of bodies and what they hold, for OpenAPI's components."""
    _, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    return dict(components)


async def read_json(request: Request, kind: type[T], limit: int) -> T:
    """Read and decode a JSON body.

    Args:
        request: whose body is unread.
        kind: a msgspec Struct.
        limit: most bytes accepted; a longer body is never held in memory.

    Raises:
        ApiError: 413 too long, 415 not JSON by its headers.
        InvalidRequestError: not valid JSON, or of the wrong types; names the field.
    """
    _check_headers(request)
    return decode_json(await _read(request, limit), kind)


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode JSON into a struct.

    Raises:
        InvalidRequestError: not valid JSON, or of the wrong types; names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, str(error)) from None


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"the body must be JSON, with the header Content-Type: application/json,"
            f" not {content_type or 'none'}",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ApiError(
            415, f"Content-Encoding {encoding} is not supported; send the body as it is",
            code="unsupported_media_type",
        )  # fmt: skip


async def _read(request: Request, limit: int) -> bytes:
    message = f"the body is longer than the {limit} bytes this server takes"
    too_long = ApiError(413, message, code="request_too_large")
    declared = request.headers.get("content-length", "0")
    # Digits only are let through by the HTTP parser, but maybe more than int() takes.
    if len(declared) > 18 or int(declared) > limit:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_long
        chunks.append(chunk)
    return b"".join(chunks)


def _wrong_type(message: str) -> InvalidRequestError:
    """msgspec's complaint in plain words, with the field's name."""
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
        return InvalidRequestError(f"the body is not what it should be: {what}")
    place = f"a key of {path}" if match["part"] else path
    return InvalidRequestError(f"{place}: {what}", param=path)


def _malformed(body: bytes, complaint: str) -> InvalidRequestError:
    """Why bytes are no JSON; names the field where the fault lies in a value.

    Python's own parser is more lenient: it takes NaN, lone surrogates and, with a trick, invalid
    UTF-8, so what it returns tells where they are.
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
    """NaN, Infinity or -Infinity where a number should be."""


def _leaves(value: object) -> Iterator[tuple[str, object]]:
    """Every scalar of a JSON value with its path, such as ``messages[0].content``.

    Keys come with the path of their object, before what stands under them.
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
    """Whether surrogates in it stand for undecodable bytes (PEP 383), not for themselves."""
    return any("\udc80" <= character <= "\udcff" for character in text)
