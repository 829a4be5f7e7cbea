"""RequestLog: gives each request an id, and logs and counts each when it is finished.

Nothing that a client has written is logged but its ``X-Request-Id`` and the path that it asked for.
"""

import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midfill.serving.server.errors import CLIENT_GONE
from midfill.serving.server.metrics import Metrics
from midfill.serving.server.request_record import RequestRecord, current_request
from midfill.system.logs import log_context

_log = logging.getLogger("midfill.access")

_HEADER = b"x-request-id"
_SANE = re.compile(rb"[!-~]{1,128}")
_MAX_PATH = 200  # characters of an unknown path
# Asked for every few seconds, by monitoring and pages: no news while they answer.
_ROUTINE = re.compile("/(health|livez|readyz|metrics|dashboard|pages/.*)?")


class Traces(Protocol):
    """Where requests' traces go; see ``tracing.RequestTraces``."""

    def record(
        self,
        record: RequestRecord,
        headers: Iterable[tuple[bytes, bytes]],
        status: int,
        finish_reasons: Sequence[str],
        now: float,
    ) -> str | None:
        """Send a finished request's trace; return its id."""
        ...


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
        traces: Traces | None = None,
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

        # Each request has a task, and so a context, of its own: nothing has to be set back.
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
