"""What stands around the application: the log of requests, refusals, and cancelling.

``RequestLog`` gives each request an id, and logs and counts each when it is finished. Nothing that
a client has written is logged but its ``X-Request-Id`` and the path that it asked for.
"""

import asyncio
import ipaddress
import logging
import re
import socket
import time
import uuid
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midfill.errors import MidfillError
from midfill.serving.server.auth import KeyRing, find_tenant
from midfill.serving.server.metrics import Metrics
from midfill.serving.server.request import RequestRecord, current_request
from midfill.serving.server.responses import CLIENT_GONE, ApiError, ErrorBody, error_response
from midfill.serving.server.service import ModelService
from midfill.system.logs import ACCESS, log_context

if TYPE_CHECKING:  # needs an extra
    from midfill.serving.server.tracing import RequestTraces

_log = logging.getLogger(ACCESS)
_HEADER = b"x-request-id"
_SANE = re.compile(rb"[!-~]{1,128}")
_MAX_PATH = 200  # characters of an unknown path

# Asked for every few seconds, by monitoring and pages: no news while they answer.
_ROUTINE = re.compile("/(health|livez|readyz|metrics(/history)?|dashboard|planner|pages/.*)?")


class RequestLog:
    """ASGI middleware, the outermost: it sees what clients get, errors included.

    Args:
        app: handles the requests.
        metrics: counts them.
        traces: where their traces go; None makes none.
        redact: leave out what clients choose: their ids, and paths that don't exist.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        traces: "RequestTraces | None" = None,
        *,
        redact: bool = False,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces
        self._redact = redact

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(
            request_id=uuid.uuid4().hex if self._redact else _request_id(scope),
            method=scope["method"],
            path=scope["path"],
            arrived=time.perf_counter(),
            headers=scope["headers"],
        )

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not record.complete:
                record.abandoned = True
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), (_HEADER, record.request_id.encode())]
                message = {**message, "headers": headers}
            elif not message.get("more_body", False):
                record.complete = not record.abandoned
            await send(message)

        # Each request sets them anew before they are read: nothing has to be set back.
        current_request.set(record)
        log_context.set({"request_id": record.request_id})
        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            self._finish(record, scope, time.perf_counter())

    def _finish(self, record: RequestRecord, scope: Scope, now: float) -> None:
        status = final_status(record)
        if self._redact:
            record.path = getattr(scope.get("route"), "path", "-")
        self._metrics.response_sent(record.tenant, status)
        if self._traces is not None and record.method == "POST":
            reasons = finish_reasons(record)
            record.trace_id = self._traces.record(record, scope["headers"], status, reasons, now)
        log_request(record, now)


def log_request(record: RequestRecord, now: float) -> None:
    """Log a finished request."""
    status = final_status(record)
    is_routine = status < 400 and _ROUTINE.fullmatch(record.path) is not None
    level = logging.DEBUG if is_routine else logging.INFO
    if not _log.isEnabledFor(level):
        return
    path = record.path[:_MAX_PATH].encode("unicode_escape").decode("ascii")
    named = {"method": record.method, "path": path, "status": status}
    fields = {
        "request_id": record.request_id,
        "tenant": record.tenant or None,
        "model": record.model,
        **_costs(record),
        "duration_seconds": round(now - record.arrived, 6),
        "finish_reason": ",".join(finish_reasons(record)) or None,
        "error": record.error,
        "trace_id": record.trace_id,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    _log.log(level, "%(method)s %(path)s %(status)s", named, extra=known)


def final_status(record: RequestRecord) -> int:
    """Return the HTTP status; like nginx 499 if the client disconnected before it had all of it."""
    if record.abandoned:
        return CLIENT_GONE
    return 503 if record.status is None else record.status  # none: cut off by the server's end


def finish_reasons(record: RequestRecord) -> list[str]:
    """Return why the answers ended, different reasons once; nothing without answers."""
    if record.abandoned:
        return ["abort"]
    if record.generation is None:
        return []
    if record.error is not None:
        return ["error"]
    return list(dict.fromkeys(record.generation.finish_reasons)) or ["abort"]


def _costs(record: RequestRecord) -> Mapping[str, float | None]:
    """Return the request's tokens and times, as far as they are known."""
    generation = record.generation
    if generation is None:
        return {}
    usage, times = generation.usage, generation.times
    first = times.first_token
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens if times.admitted and usage.knows_cached else None,
        "completion_tokens": usage.completion_tokens,
        "queue_seconds": None if times.queued is None else round(times.queued, 6),
        "ttft_seconds": None if first is None else round(first - record.arrived, 6),
    }


def _request_id(scope: Scope) -> str:
    """Return the client's id, if it is fit for headers and logs, or else a new one."""
    given: list[bytes] = [value for name, value in scope["headers"] if name == _HEADER]
    if given and _SANE.fullmatch(given[0]):
        return given[0].decode("ascii")
    return uuid.uuid4().hex


class CancelOnDisconnect:
    """ASGI middleware: whatever a request is doing, it ends when its client disconnects.

    A request may be waiting for the encoding thread, for its turn in the engine, for its first
    token or for the next one. It is cancelled there, and what it holds in the engine ends within
    one step. The dialects need not think of it.

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


class EarlyRefusal:
    """ASGI middleware: refuses requests before anything is done where none may be queued.

    It stands before the paths whose requests are queued for the engine. Under overload most
    requests are refused, and each refusal takes time from those that are answered. Beside an engine
    that reads all its weights in every step, the caches hold nothing of the server's code, so what
    a refusal costs is the code that it runs through. Here that is little: neither a route is looked
    for nor a body read.

    Args:
        app: handles the requests.
        service: knows whether a request may be queued.
        keys: tell whose request it is.
        error_bodies: the paths, with their shapes of errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: ModelService,
        keys: KeyRing,
        error_bodies: Mapping[str, ErrorBody],
    ) -> None:
        self._app = app
        self._service = service
        self._keys = keys
        self._error_bodies = error_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "http" and scope["method"] == "POST":
            error_body = self._error_bodies.get(scope["path"])
            if error_body is not None:
                try:
                    find_tenant(Request(scope), self._keys)
                    self._service.check_queue()
                except MidfillError as error:
                    await error_response(error, error_body)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class OwnHosts:
    """ASGI middleware of a server for its own machine alone: refuses other names with status 421.

    A web page can't read what a server on the user's machine answers, since it is of another
    origin. But its owner can let the page's own name point to 127.0.0.1 once the page is loaded
    (DNS rebinding); the browser then takes the server for a part of the page's site, and names that
    site in the header ``Host``. Numbers can't be made to point elsewhere, so addresses are always
    right.

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
