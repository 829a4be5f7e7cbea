"""CancelOnDisconnect: whatever a request is doing, it ends when its client disconnects.

A request may be waiting for the encoding thread, for its turn in the engine, for its first token or
for the next one. It is cancelled there, and what it holds in the engine ends within one step. The
dialects need not think of it.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CancelOnDisconnect:
    """ASGI middleware.

    Args:
        app: handles the requests. It must read a request's body to the end before it waits for
            anything else: only then is a disconnect noticed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = _Connection(receive)
        work = asyncio.ensure_future(self._app(scope, connection.receive, send))
        watch = asyncio.create_task(connection.disconnected(), name="watch for a disconnect")
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.wait({work, watch})  # until they have cleaned up
        if not work.cancelled():
            work.result()  # raises what the app raised


class _Connection:
    """The messages of one request: its body for the app, then the disconnect for both."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._body_read = asyncio.Event()
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        """Return the next message for the app."""
        if self._body_read.is_set():
            await self._gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
        if self._gone.is_set() or not message.get("more_body", False):
            self._body_read.set()
        return message

    async def disconnected(self) -> None:
        """Return once the client has disconnected, or has got the whole response."""
        await self._body_read.wait()
        while not self._gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._gone.set()
