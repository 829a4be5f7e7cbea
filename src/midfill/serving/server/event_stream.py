"""Responses that are sent piece by piece."""

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from midfill.serving.server.errors import ErrorBody, as_api_error, openai_error_body


class StreamedResponse(Response):
    """A response in pieces of JSON; the subclasses say what stands around each.

    Nothing is sent before the first piece is available, so that a request that fails until then
    gets an error status. A later failure becomes a piece with the dialect's error object.

    Args:
        events: what to send as JSON; closed when the client disconnects.
        error_body: the dialect's shape of errors.
    """

    end = b""

    def __init__(
        self, events: AsyncGenerator[object, None], error_body: ErrorBody = openai_error_body
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._error_body = error_body

    def frame(self, data: bytes) -> bytes:
        """Return a piece as it is sent."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        start = {"type": "http.response.start", "status": self.status_code}
        async with contextlib.aclosing(self._events) as events:
            event = await anext(events, None)
            await send({**start, "headers": self.raw_headers})
            try:
                while event is not None:
                    await self._send(send, event)
                    event = await anext(events, None)
            except Exception as error:
                await self._send(send, self._error_body(as_api_error(error)))
        await send({"type": "http.response.body", "body": self.end, "more_body": False})

    async def _send(self, send: Send, event: object) -> None:
        data = self.frame(msgspec.json.encode(event))
        await send({"type": "http.response.body", "body": data, "more_body": True})


class ServerSentEvents(StreamedResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    def frame(self, data: bytes) -> bytes:
        """Return the event that holds ``data``."""
        return b"data: " + data + b"\n\n"


class EventStream(ServerSentEvents):
    """Server-sent events as OpenAI sends them, with ``[DONE]`` at the end."""

    end = b"data: [DONE]\n\n"


class JsonLines(StreamedResponse):
    """JSON values, each on a line of its own (NDJSON)."""

    media_type = "application/x-ndjson"

    def frame(self, data: bytes) -> bytes:
        """Return the line that holds ``data``."""
        return data + b"\n"
