"""Notices: each kind of trouble is shown once, and not again before it is over."""

from midfill.errors import MidfillError
from midfill.lsp.queries import ServerBusyError


class Notices:
    """Remembers which kinds of trouble the user was told of."""

    def __init__(self) -> None:
        self._told: set[type[MidfillError]] = set()

    def arises(self, trouble: MidfillError) -> bool:
        """Note a trouble; return whether the user is to be told.

        A server that is busy is none to tell of: it will soon be ready by itself.
        """
        if isinstance(trouble, ServerBusyError) or type(trouble) in self._told:
            return False
        self._told.add(type(trouble))
        return True

    def over(self) -> bool:
        """Note that a server has answered; return whether the user was told of any trouble."""
        told = bool(self._told)
        self._told.clear()
        return told
