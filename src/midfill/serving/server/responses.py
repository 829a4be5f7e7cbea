"""HTTP responses: errors in the shape of the dialect whose path failed, and streamed answers."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from midfill.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    MidfillError,
    QueueFullError,
    RateLimitError,
    StoppingError,
    UnavailableError,
    UpstreamError,
)
from midfill.serving.server.request import current_request

_log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's number; no client sees it
_MAX_CHARACTERS = 500  # of the client's own input in a message


class ApiError(MidfillError):
    """An error as HTTP shows it.

    Attributes:
        status: the HTTP status.
        param, code: see InvalidRequestError.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


ErrorBody = Callable[[ApiError], object]
"""A dialect's shape of errors: returns the JSON body of one."""


def as_api_error(error: Exception) -> ApiError:
    """Return the HTTP error for any exception, and note it in the request's record.

    Bugs are logged, not exposed to clients.
    """
    api_error = _as_api_error(error)
    record = current_request.get()
    if record is not None:
        record.error = api_error.code or _error_type(api_error.status)
    return api_error


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers=retry_header(error))
    if isinstance(error, RateLimitError):
        code = "rate_limit_exceeded"
        return ApiError(429, str(error), code=code, headers=retry_header(error))
    if isinstance(error, EngineDeadError):
        code = "engine_dead" if error.retry_after is None else "engine_restarting"
        return ApiError(503, str(error), code=code, headers=retry_header(error))
    if isinstance(error, DeadlineError):
        return ApiError(503, str(error), code="deadline_exceeded", headers=retry_header(error))
    if isinstance(error, StoppingError):
        return ApiError(503, str(error), code="server_stopping", headers=retry_header(error))
    if isinstance(error, UpstreamError):
        status = 502 if error.retry_after is None else 503
        return ApiError(status, str(error), code="upstream_error", headers=retry_header(error))
    if isinstance(error, MidfillError):
        return ApiError(500, str(error))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def retry_header(error: UnavailableError) -> dict[str, str]:
    """Return the Retry-After header of an error, if it knows when to try again."""
    return {} if error.retry_after is None else {"retry-after": str(error.retry_after)}


def openai_error_body(error: ApiError) -> dict[str, object]:
    """Return OpenAI's shape, which other paths get as well."""
    return {
        "error": {
            "message": error_message(error),
            "type": _error_type(error.status),
            "param": None if error.param is None else _quotable(error.param),
            "code": error.code,
        }
    }


def error_message(error: ApiError) -> str:
    """Return an error's message; what it quotes of the client's input is shortened."""
    return _quotable(str(error))


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _quotable(text: str) -> str:
    """Return text that may quote the client's input, shortened and fit for JSON."""
    shown = text[:_MAX_CHARACTERS].encode(errors="backslashreplace").decode()
    return shown if len(text) <= _MAX_CHARACTERS else f"{shown}..."


def error_response(error: Exception, error_body: ErrorBody = openai_error_body) -> Response:
    """Return the HTTP response for any exception."""
    api_error = as_api_error(error)
    return Response(
        msgspec.json.encode(error_body(api_error)),
        status_code=api_error.status,
        headers=api_error.headers,
        media_type="application/json",
    )


def install_error_handlers(
    app: FastAPI, error_bodies: Mapping[str, ErrorBody], prefixes: Mapping[str, ErrorBody]
) -> None:
    """Give every error its dialect's shape, unknown paths OpenAI's.

    Args:
        app: the application.
        error_bodies: the shapes by path.
        prefixes: those of unknown paths, by what they begin with.
    """

    def error_body_of(path: str) -> ErrorBody:
        unknown = (body for prefix, body in prefixes.items() if path.startswith(prefix))
        return error_bodies.get(path) or next(unknown, openai_error_body)

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = ApiError(404, f"there is nothing at {request.method} {request.url.path}")
        elif isinstance(error, HTTPException) and error.status_code == 405:
            message = f"{request.url.path} doesn't take {request.method}"
            error = ApiError(405, message, headers=error.headers)
        return error_response(error, error_body_of(request.url.path))

    async def ignore(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind in (MidfillError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(ClientDisconnect, ignore)


class StreamedResponse(Response):
    """A response in pieces of JSON; the subclasses say what stands around each.

    Nothing is sent before the first piece is available, so that a request that fails until then
    gets an error status. A later failure becomes a piece with the dialect's error object.

    Args:
        events: what to send as JSON; closed when the client disconnects.
        error_body: the dialect's shape of errors.
    """

    before, after, end = b"", b"\n", b""
    """What stands before and after each piece, and at the end."""

    def __init__(
        self, events: AsyncGenerator[object, None], error_body: ErrorBody = openai_error_body
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._error_body = error_body

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
        data = self.before + msgspec.json.encode(event) + self.after
        await send({"type": "http.response.body", "body": data, "more_body": True})


class ServerSentEvents(StreamedResponse):
    """Server-sent events."""

    media_type = "text/event-stream"
    before, after = b"data: ", b"\n\n"


class EventStream(ServerSentEvents):
    """Server-sent events as OpenAI sends them, with ``[DONE]`` at the end."""

    end = b"data: [DONE]\n\n"


class JsonLines(StreamedResponse):
    """JSON values, each on a line of its own (NDJSON)."""

    media_type = "application/x-ndjson"
