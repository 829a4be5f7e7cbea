"""Errors as HTTP answers, always in OpenAI's shape: {"error": {message, type, param, code}}."""

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from midfill.errors import EngineDeadError, InvalidRequestError, MidfillError

_log = logging.getLogger(__name__)

_CLIENT_GONE = 499  # nginx's number; seen in logs at most
_MOST_CHARACTERS = 500


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


class ApiError(MidfillError):
    """An HTTP error of the server itself.

    Attributes:
        status: HTTP status.
        param, code: as in InvalidRequestError.
        headers: to send along.
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


def as_api_error(error: Exception) -> ApiError:
    """The HTTP error that stands for any exception; what is a bug is logged and not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead", headers={"retry-after": "5"})
    if isinstance(error, MidfillError):
        return ApiError(500, str(error))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def error_body(error: ApiError) -> dict[str, object]:
    """The JSON body of an error."""
    return {
        "error": {
            "message": _quotable(str(error)),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": None if error.param is None else _quotable(error.param),
            "code": error.code,
        }
    }


def _quotable(text: str) -> str:
    """Text that may hold the client's own input, as JSON can hold it and of bearable length."""
    text = text.encode(errors="backslashreplace").decode()
    short = len(text) <= _MOST_CHARACTERS
    return text if short else f"{text[:_MOST_CHARACTERS]}..."


def error_response(error: Exception) -> Response:
    """Any exception as an HTTP answer."""
    api_error = as_api_error(error)
    return Response(
        msgspec.json.encode(error_body(api_error)),
        status_code=api_error.status,
        headers=api_error.headers,
        media_type="application/json",
    )


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of an app, unknown paths and methods too, in the one shape."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = ApiError(404, f"there is nothing at {request.method} {request.url.path}")
        elif isinstance(error, HTTPException) and error.status_code == 405:
            message = f"{request.url.path} doesn't take {request.method}"
            error = ApiError(405, message, headers=error.headers)
        return error_response(error)

    async def nobody_listens(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE)

    for kind in (MidfillError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    for gone in (ClientGoneError, ClientDisconnect):
        app.add_exception_handler(gone, nobody_listens)
