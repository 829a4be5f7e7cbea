"""MethodResolver: the methods that one model's requests may use, made once and shared by them."""

from collections.abc import Callable
from dataclasses import dataclass

from midfill.errors import InvalidRequestError, OptionError
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import (
    OFF,
    check_name,
    parse_name,
    resolve_method,
    split_methods,
)
from midfill.methods.served_model import ServedModel

ANY = "any"
"""Stands for all methods in a list of those that requests may use."""

_MAX_REMEMBERED = 64


@dataclass(frozen=True)
class AllowedMethods:
    """Which methods a request may name.

    Attributes:
        names: of methods; "none" allows requests to keep all KV, "any" allows everything.
        default: the specification for requests that name none. It may always be named.

    Raises:
        InvalidRequestError: there is no such method or option.
    """

    names: tuple[str, ...] = ()
    default: str = OFF

    def __post_init__(self) -> None:
        resolve_method(self.default)
        for name in self.names:
            if name not in (ANY, OFF):
                check_name(name)

    def check(self, specification: str) -> None:
        """Check what a request names.

        Raises:
            InvalidRequestError: there is no such method or option, or requests may not use it.
        """
        resolve_method(specification)
        if specification == self.default or ANY in self.names:
            return
        names = [parse_name(part) for part in split_methods(specification)] or [OFF]
        refused = [name for name in names if name not in self.names]
        if not refused:
            return
        name = refused[0]
        others = f"; they may use {', '.join(self.names)}" if self.names else ""
        raise InvalidRequestError(
            f"requests may not use {name!r} here{others}; whoever runs the server can allow it"
            f" with --allow-method {name}",
            param="method",
        )


class MethodResolver:
    """Finds methods by specification and makes them ready for one model.

    Args:
        model: describes the model; called once a method asks.
        allowed: what requests may name.

    Attributes:
        default: the method for requests that name none; None keeps all KV.

    Raises:
        OptionError: the default doesn't suit the model.
    """

    def __init__(self, model: Callable[[], ServedModel], allowed: AllowedMethods) -> None:
        self._model = model
        self._allowed = allowed
        self._found: dict[str, Method | None] = {}
        try:
            self.default = self._prepared(allowed.default)
        except InvalidRequestError as error:
            raise OptionError(f"--method {allowed.default}: {error}") from None

    def find(self, specification: str) -> Method | None:
        """Return the method that a request names; None computes and keeps all KV.

        Raises:
            InvalidRequestError: there is no such method or option, requests may not use it, or it
                doesn't suit the model.
        """
        if specification not in self._found:
            self._allowed.check(specification)
            method = self._prepared(specification)
            if len(self._found) >= _MAX_REMEMBERED:
                self._found.clear()
            self._found[specification] = method
        return self._found[specification]

    def _prepared(self, specification: str) -> Method | None:
        method = resolve_method(specification)
        return method.for_model(self._model()) if isinstance(method, ModelSpecific) else method
