"""MethodChoice: which methods of the engine requests may name."""

from typing import Protocol

from midfill.errors import InvalidRequestError


class MethodChoice(Protocol):
    """See ``methods.shelf.AllowedMethods``."""

    def check(self, specification: str) -> None:
        """Check what a request names.

        Raises:
            InvalidRequestError: there is no such method, or requests may not use it.
        """
        ...


class NoMethods:
    """The choice where there is no method at all."""

    def check(self, specification: str) -> None:
        """Refuse every method."""
        raise InvalidRequestError("methods are the engine's; there are none here", param="method")
