"""What "name:option=value,option=value" means: how methods, schedulers and codecs are named.

A name may be followed by options, the fields of a dataclass. Several named things that go together
are joined with "+".
"""

import dataclasses
import difflib
import re
from typing import Any, get_type_hints

from midfill.errors import InvalidRequestError

_MAX_CHARACTERS = 1000


def split_specification(text: str, *, param: str) -> list[str]:
    """Return the parts of a specification that are joined with "+"; at least one.

    Args:
        text: the specification.
        param: what it is the value of, for the error.

    Raises:
        InvalidRequestError: it is longer than any that means something.
    """
    if len(text) > _MAX_CHARACTERS:
        raise InvalidRequestError(
            f"a name with its options has at most {_MAX_CHARACTERS} characters, not {len(text)}",
            param=param,
        )
    return re.split(r"\+(?=[a-z])", text)  # a "+" in a number's exponent divides nothing


def defaults(factory: type[Any]) -> dict[str, object]:
    """Return the names of a dataclass's fields and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(factory)}


def make_options(factory: type[Any], name: str, settings: str, *, param: str) -> Any:
    """Return ``factory`` with the options that "option=value,option=value" lists.

    Args:
        factory, name, settings, param: see ``parse_options``.

    Raises:
        InvalidRequestError: there is no such option, or a value doesn't fit.
    """
    known = list(defaults(factory))
    return factory(**parse_options(factory, name, settings, known=known, param=param))


def parse_options(
    factory: type[Any], name: str, settings: str, *, known: list[str], param: str
) -> dict[str, object]:
    """Return the options that "option=value,option=value" lists, by name.

    Args:
        factory: a dataclass.
        name: what has the options, for errors.
        settings: "" gives none.
        known: which of the dataclass's fields are options.
        param: what the specification is the value of, for errors.

    Raises:
        InvalidRequestError: there is no such option, or a value doesn't fit.
    """
    kinds = get_type_hints(factory)
    values: dict[str, object] = {}
    for item in filter(None, settings.split(",")):
        option, equals, text = item.partition("=")
        if option not in known:
            nearest = nearest_name(option, known) if known else ": it has none"
            raise InvalidRequestError(f"{name} has no option {option!r}{nearest}", param=param)
        if not equals:
            raise InvalidRequestError(f"{name}: write {option}=VALUE", param=param)
        try:
            values[option] = kinds[option](text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}.get(kinds[option], "text")
            raise InvalidRequestError(
                f"{name}: {option} must be {wanted}, not {text!r}", param=param
            ) from None
    return values


def nearest_name(name: str, known: list[str]) -> str:
    """Return the end of a message: the nearest of some names, or all of them if none is near."""
    wanted = name.lower()
    begun = [each for each in known if len(wanted) > 2 and each.startswith(wanted)]
    found = begun or difflib.get_close_matches(wanted, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; there are {', '.join(known)}"
