"""EarlyRefusal: where no request may be queued, new ones are refused before anything is done.

Under overload most requests are refused, and each refusal takes time from those that are answered.
Beside an engine that reads all its weights in every step, the caches hold nothing of the server's
code, so what a refusal costs is the code that it runs through. Here that is little: neither a route
is looked for nor a body read.
"""

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from midfill.errors import MidfillError
from midfill.serving.server.errors import ErrorBody, error_response

CheckQueue = Callable[[Request], None]
"""Raises an error where a request would be refused whatever it asks."""


class EarlyRefusal:
    """ASGI middleware for the paths whose requests are queued for the engine.

    Args:
        app: handles the requests.
        check: of each POST request to one of the paths.
        error_bodies: these paths, with their shapes of errors.
    """

    def __init__(
        self, app: ASGIApp, check: CheckQueue, error_bodies: Mapping[str, ErrorBody]
    ) -> None:
        self._app = app
        self._check = check
        self._error_bodies = error_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "http" and scope["method"] == "POST":
            error_body = self._error_bodies.get(scope["path"])
            if error_body is not None:
                try:
                    self._check(Request(scope))
                except MidfillError as error:
                    await error_response(error, error_body)(scope, receive, send)
                    return
        await self._app(scope, receive, send)
