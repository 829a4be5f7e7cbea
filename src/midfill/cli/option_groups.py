"""Options that commands take as a group: the fields of one object, declared once.

A group is a dataclass whose fields are annotated as Typer takes them, or some or all ``Flag``s of a
class of ``config`` or ``serving.options`` (``FlagsOf``).
"""

import dataclasses
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, Union, get_args, get_origin, get_type_hints

import typer

from midfill import config
from midfill.cli import values
from midfill.config import Flag
from midfill.errors import MidfillError
from midfill.serving import options

_DECLARING = (config.__name__, options.__name__)
"""Modules whose classes can be fields of such a class."""

PARSERS: dict[str, Callable[[str], Any]] = {
    "size": values.parse_size,
    "folder": lambda text: str(Path(text).absolute()),
    "fim_tokens": values.parse_fim_tokens,
    "window": values.parse_window,
    "method": values.parse_method,
    "reuse": values.parse_reuse,
    "scheduler": values.parse_scheduler,
    "allowed_method": values.parse_allowed_method,
    "codec": values.parse_codec,
}
"""How values are written, by ``Flag.kind``."""


class FlagsOf:
    """Annotates a parameter ``dict[str, Any]`` that gets fields of a class of ``config``, by name.

    Args:
        kind: the class.
        fields: which of its fields; none are all that have flags, or hold objects that have.
        leave_out: fields that are left out.
    """

    def __init__(self, kind: type, *fields: str, leave_out: tuple[str, ...] = ()) -> None:
        self._leaves = [
            leaf
            for leaf in _leaves(kind, ())
            if (not fields or leaf.path[0] in fields) and leaf.path[0] not in leave_out
        ]
        self._kind = kind

    @property
    def parameters(self) -> Iterator[inspect.Parameter]:
        """The command's parameters."""
        for leaf in self._leaves:
            yield from leaf.parameters()

    def take(self, given: dict[str, Any]) -> dict[str, Any]:
        """Remove the command's values from ``given``, and return the fields.

        Raises:
            MidfillError: an option lacks another one.
        """
        found = {leaf.path: leaf.take(given) for leaf in self._leaves}
        return _fields(self._kind, (), found)


def option_of(kind: type, name: str) -> Any:
    """Return a field's flag as Typer takes it, for a command that takes it by itself."""
    (leaf,) = (leaf for leaf in _leaves(kind, ()) if leaf.path == (name,))
    return leaf.option()


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of its groups as parameters of its own, for Typer.

    Args:
        command: those of its parameters whose annotation is a dataclass, or is annotated with
            ``FlagsOf``, are groups. The options stand in ``--help`` where the group stands among
            the parameters.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type | FlagsOf] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        flags = next((each for each in get_args(hint)[1:] if isinstance(each, FlagsOf)), None)
        if flags is not None:
            groups[name] = flags
            parameters += flags.parameters
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            groups[name] = hint
            parameters += _parameters_of(hint)
        else:
            parameters.append(parameter.replace(annotation=hint))

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            if isinstance(group, FlagsOf):
                given[name] = group.take(given)
            else:
                names = [field.name for field in dataclasses.fields(group)]
                given[name] = group(**{each: given.pop(each) for each in names})
        command(**given)

    # Typer reads both.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _parameters_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]


@dataclass(frozen=True)
class _Leaf:
    """A field that has a flag: the names that lead to it, its type and its default."""

    path: tuple[str, ...]
    flag: Flag
    kind: Any
    default: Any

    @property
    def name(self) -> str:
        """Name of the command's parameter."""
        return "__".join(self.path)

    def option(self, *, former: bool = False, panel: str | None = None) -> Any:
        """Return the option as Typer takes it."""
        flag = self.flag
        name = flag.name or f"--{self.path[-1].replace('_', '-')}"
        if self.kind is bool and flag.name is None:
            name = f"{name}/--no-{name.removeprefix('--')}"
        bounds: dict[str, Any] = {"min": flag.min, "max": flag.max}
        if flag.kind is not None:
            parse = PARSERS[flag.kind]
            bounds["parser"] = lambda given: parse(given) if isinstance(given, str) else given
        return typer.Option(
            flag.former if former and flag.former is not None else name,
            help=flag.help,
            metavar=flag.metavar,
            envvar=flag.envvar,
            hidden=former,
            rich_help_panel=panel,
            **bounds,
        )

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield the command's parameters: the option, and its former name if it has one."""
        kind, default, flag = self.kind, self.default, self.flag
        if flag.repeated:
            kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
        elif flag.scale is not None:
            default /= flag.scale
        if flag.written_default is not None:
            default = flag.written_default
        yield self._parameter(self.name, Annotated[kind, self.option(panel=flag.panel)], default)
        if flag.former is not None:
            hidden: Any = Annotated[Optional[kind], self.option(former=True)]  # noqa: UP045
            yield self._parameter(f"{self.name}__former", hidden, None)

    def _parameter(self, name: str, annotation: Any, default: Any) -> inspect.Parameter:
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=annotation)

    def take(self, given: dict[str, Any]) -> Any:
        """Remove the command's value from ``given``, and return the field's.

        Raises:
            MidfillError: the option's environment variable is set but empty.
        """
        value, flag = given.pop(self.name), self.flag
        former = given.pop(f"{self.name}__former", None)
        if former is not None:
            value = former
        if flag.repeated:
            if not value and flag.missing is not None and (flag.envvar or "") in os.environ:
                raise MidfillError(flag.missing)
            return tuple(value or ())
        return value if flag.scale is None else value * flag.scale


def _leaves(kind: Any, path: tuple[str, ...]) -> Iterator[_Leaf]:
    """Yield the fields of a class that have flags, and those of the objects that it holds."""
    for name, hint, default in _hints(kind):
        here = (*path, name)
        flag = next((each for each in get_args(hint)[1:] if isinstance(each, Flag)), None)
        if flag is not None:
            field_kind = get_args(hint)[0]
            if default is inspect.Parameter.empty:  # only of objects that may be missing
                field_kind, default = field_kind | None, None
            yield _Leaf(here, flag, field_kind, default)
        elif (held := _held(hint)) is not None:
            yield from _leaves(held, here)


def _hints(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, annotated type and default of a class's fields."""
    hints = get_type_hints(kind, include_extras=True)
    for name, parameter in inspect.signature(kind).parameters.items():
        yield name, hints[name], parameter.default


def _held(hint: Any) -> Any:
    """Return the class of options that a field holds, if it holds one, or None of it."""
    union = get_origin(hint) in (Union, types.UnionType)
    kinds = [kind for kind in (get_args(hint) if union else (hint,)) if kind is not type(None)]
    is_class = len(kinds) == 1 and isinstance(kinds[0], type)
    return kinds[0] if is_class and kinds[0].__module__ in _DECLARING else None


def _fields(kind: Any, path: tuple[str, ...], found: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return the values of a class's fields that are among the flags that were taken."""
    fields: dict[str, Any] = {}
    for name, hint, default in _hints(kind):
        here = (*path, name)
        if here in found:
            fields[name] = found[here]
        elif any(each[: len(here)] == here for each in found):
            held = _held(hint)
            values = _fields(held, here, found)
            fields[name] = held(**values) if default is not None else _present(held, values)
    return fields


def _present(kind: Any, values: dict[str, Any]) -> Any:
    """Return an object that is there only if one of its values is; None if none is.

    Raises:
        MidfillError: a value is missing that the others need.
    """
    if all(value is None for value in values.values()):
        return None
    for name, hint, default in _hints(kind):
        if default is inspect.Parameter.empty and values[name] is None:
            (flag,) = (each for each in get_args(hint)[1:] if isinstance(each, Flag))
            raise MidfillError(flag.missing or f"{name} is missing")
    return kind(**values)
