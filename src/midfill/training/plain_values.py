"""Plain values, as TOML and JSON hold them, to a dataclass; each checked against its type."""

import dataclasses
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from midfill.errors import MidfillError

Built = TypeVar("Built")

_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def build(kind: type[Built], values: object, where: str = "") -> Built:
    """An instance of a dataclass whose fields all have defaults.

    Args:
        kind: the dataclass; its fields are numbers, texts, booleans, Literals, tuples of these,
            other dataclasses like it, or None beside one of these.
        values: a mapping from names to values; what is left out has its default.
        where: what names in errors begin with.

    Raises:
        MidfillError: an unknown name or a value of the wrong kind.
    """
    if not isinstance(values, Mapping):
        name = where.removesuffix(".") or "the whole"
        raise MidfillError(f"{name} must be a table of names and values, not {values!r}")
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise MidfillError(f"unknown name {where}{name}; known: {', '.join(hints)}")
    return kind(
        **{name: _checked(f"{where}{name}", value, hints[name]) for name, value in values.items()}
    )


def _checked(name: str, value: object, hint: Any) -> object:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{name}.")  # type: ignore[arg-type]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise MidfillError(f"{name} must be one of {', '.join(arguments)}, not {value!r}")
        return value
    if origin is UnionType:
        (inner,) = (each for each in arguments if each is not type(None))
        return None if value is None else _checked(name, value, inner)
    if origin is tuple:
        return _checked_tuple(name, value, arguments)
    if hint is float and type(value) is int:
        value = float(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    if type(value) is not hint or not finite:
        raise MidfillError(f"{name} must be {_KINDS[hint]}, not {value!r}")
    return value


def _checked_tuple(name: str, value: object, arguments: tuple[Any, ...]) -> tuple[object, ...]:
    endless = arguments[-1] is Ellipsis
    if not isinstance(value, list | tuple) or (not endless and len(value) != len(arguments)):
        count = "" if endless else f" of {len(arguments)}"
        raise MidfillError(f"{name} must be a list{count}, not {value!r}")
    return tuple(_checked(name, each, arguments[0]) for each in value)
