"""OwnHosts: a server for its own machine alone answers to no other name.

A web page can't read what a server on the user's machine answers, since it is of another origin.
But its owner can let the page's own name point to 127.0.0.1 once the page is loaded (DNS
rebinding); the browser then takes the server for a part of the page's site, and names that site in
the header ``Host``. Numbers can't be made to point elsewhere, so addresses are always right.
"""

import ipaddress
import socket
from collections.abc import Collection
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from midfill.serving.server.errors import ApiError, error_response


class OwnHosts:
    """ASGI middleware that refuses requests for other hosts with status 421.

    Args:
        app: handles the requests.
        names: of this machine, beside ``localhost`` and those below it, and its own.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = ()) -> None:
        self._app = app
        self._names = {name.lower().rstrip(".") for name in (*names, socket.gethostname())}
        self._is_own = lru_cache(maxsize=64)(self.is_own)  # clients use few names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        host = next((value for name, value in scope.get("headers", ()) if name == b"host"), b"")
        if scope["type"] == "http" and not self._is_own(host.decode("latin-1")):
            error = ApiError(
                421,
                "this server answers to its own machine only, not under another name; a server that"
                " has API keys does, and so does one that is named the host: --allowed-host NAME",
                code="misdirected_request",
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def is_own(self, host: str) -> bool:
        """Return whether a Host header names this machine; one that is empty names none."""
        name = _without_port(host).lower().rstrip(".")
        if not name or name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdecimal() or not port) else host
