"""Responses whose work is cancelled when the client disconnects: streamed or whole."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from midfill.server.errors import ClientGoneError, as_api_error, error_body

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it if the client disconnects first.

    The request's body must have been read.

    Raises:
        ClientGoneError: the client disconnected.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for unneeded in (task, watch):
            unneeded.cancel()
        await asyncio.wait({task, watch})  # until they have cleaned up


class EventStream(Response):
    """Server-sent events as OpenAI sends them, with ``[DONE]`` at the end.

    Nothing is sent before the first event is available, so that a request that fails until then
    gets an error status. A later failure becomes an event with OpenAI's error object.

    Args:
        events: what to send as JSON; closed when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[object, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        with contextlib.suppress(ClientGoneError):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        async with contextlib.aclosing(self._events) as events:
            event = await anext(events, None)
            await send({**start, "headers": self.raw_headers})
            try:
                while event is not None:
                    await send(_body(msgspec.json.encode(event)))
                    event = await anext(events, None)
            except Exception as error:
                await send(_body(msgspec.json.encode(error_body(as_api_error(error)))))
        await send(_body(b"[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
