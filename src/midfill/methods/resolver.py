"""MethodResolver: the methods that one model's requests may use, made once and shared by them."""

from collections.abc import Callable
from dataclasses import dataclass

from midfill.errors import InvalidRequestError, OptionError
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import (
    OFF,
    check_name,
    methods_of,
    parse_name,
    resolve_method,
    split_methods,
)
from midfill.methods.served_model import ServedModel

ANY = "any"
"""Stands for all methods in a list of those that requests may use."""

AUTO, NEVER = "auto", "off"
"""Of ``--reuse``: what was measured of the model, and nothing at all."""

_MAX_REMEMBERED = 64


def check_reuse(specification: str) -> None:
    """Check that a specification is of one method of reuse.

    Raises:
        InvalidRequestError: it isn't.
    """
    resolve_method(specification)
    if parse_name(specification) not in methods_of("reuse"):
        *others, last = methods_of("reuse")
        raise InvalidRequestError(
            f"{specification} takes no KV from elsewhere, as {', '.join(others)} and {last} do",
            param="method",
        )


def default_method(method: str, latent_parts: int | None) -> str:
    """Return the specification for requests that name no method.

    Where latents are kept in parts, it is the method whose answers attend to them part by part:
    without it, each row of an answer would have the latents of all keys gathered.

    Args:
        method: the option.
        latent_parts: in how many parts latents are kept; None if they are whole.
    """
    if latent_parts is None or method != OFF:
        return method
    (found,) = methods_of("latents")
    return found


def infilling_method(reuse: str, method: str, stated: str) -> str:
    """Return the specification for infilling requests that name no method; ``OFF`` if none.

    Args:
        reuse: the option: a specification, ``AUTO`` or ``NEVER``.
        method: of all requests that name none.
        stated: what the model says of itself: a specification or ``NEVER``.

    Raises:
        OptionError: a specification is of no method of reuse.
    """
    if reuse == AUTO:
        found, source = stated if method == OFF else NEVER, "reuse.method in the midfill.json"
    else:
        found, source = reuse, f"--reuse {reuse}"
    if found == NEVER:
        return OFF
    try:
        check_reuse(found)
    except InvalidRequestError as error:
        raise OptionError(f"{source}: {error}; --reuse off does without") from None
    return found


@dataclass(frozen=True)
class AllowedMethods:
    """Which methods a request may name.

    Attributes:
        names: of methods; "none" allows requests to keep all KV, "any" allows everything.
        default: the specification for requests that name none. It may always be named.
        infilling: the same for infilling requests, see ``infilling_method``.

    Raises:
        InvalidRequestError: there is no such method or option.
    """

    names: tuple[str, ...] = ()
    default: str = OFF
    infilling: str = OFF

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
        if specification in (self.default, self.infilling) or ANY in self.names:
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
        infilling: the method that servers name for infilling requests; None if there is none.

    Raises:
        OptionError: one of them doesn't suit the model.
    """

    def __init__(self, model: Callable[[], ServedModel], allowed: AllowedMethods) -> None:
        self._model = model
        self._allowed = allowed
        self._found: dict[str, Method | None] = {}
        try:
            self.default = self._prepared(allowed.default)
        except InvalidRequestError as error:
            raise OptionError(f"--method {allowed.default}: {error}") from None
        try:
            self.infilling = self._prepared(allowed.infilling)
        except InvalidRequestError as error:
            raise OptionError(f"--reuse {allowed.infilling}: {error}") from None

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
