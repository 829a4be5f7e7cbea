"""Upstream: one server behind the gateway, its load and its health."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

from midfill.engine.routing import DEFAULT_SLOTS
from midfill.errors import InvalidRequestError
from midfill.serving.gateway.upstream_api import (
    Call,
    CompletionsApi,
    LlamaCppApi,
    Piece,
    UpstreamFailedError,
    error_text,
)

Kind = Literal["vllm", "sglang", "llama.cpp", "midfill", "openai"]

_BROKEN = (aiohttp.ClientError, TimeoutError, OSError, ValueError)  # what a connection raises
_MAX_ERROR_BYTES = 65_536
_SHORT_SECONDS = 10  # for questions that need no model
_JSON = {"content-type": "application/json"}
_HEALTH = dict.fromkeys(("vllm", "sglang", "llama.cpp", "midfill"), "/health")
_TOO_LONG = ("context length", "context size", "maximum context", "context_length", "too long")

BreakerState = Literal["closed", "open", "half-open"]
_MAX_FAILURES = 3  # in a row
_MIN_OPEN_SECONDS, _MAX_OPEN_SECONDS = 1.0, 30.0
_MAX_LINE_BYTES = 4_000_000  # of one line
_DONE = b"[DONE]"
_DATA_FIELD = b"data:"
_ERROR_FIELD = b"error:"  # some versions of llama.cpp


class Upstream:
    """One server.

    Args:
        address: its URL, without a path such as /v1.
        session: sends requests.
        timeout: seconds without a byte after which it counts as failed.

    Attributes:
        address: the same.
        running: requests in progress.
        slots: as many requests run at once without much harm.
        breaker: whether it may be tried.
        known: whether it has said what it is.
        kind: which server it is.
        model: its name of the model.
        fault: why health checks rule it out; None if they don't.
        draining: whether it gets no new requests.
        slow_checks: health checks in a row that it was too slow to answer.
        failures, requests: counters.
        forces_start: whether it can be made to begin an answer with a given text.
        block_tokens: its cache's granularity in tokens; None if unknown.
    """

    def __init__(self, address: str, session: aiohttp.ClientSession, timeout: float) -> None:
        self.address = address
        self.running = 0
        self.slots = DEFAULT_SLOTS
        self.breaker = Breaker()
        self.known = False
        self.kind: Kind = "openai"
        self.model = ""
        self.fault: str | None = "has not answered yet"
        self.draining = False
        self.slow_checks = 0
        self.failures = 0
        self.requests = 0
        self.forces_start = False
        self.block_tokens: int | None = None
        self._session = session
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(timeout, 10), sock_read=timeout
        )
        self._limits = aiohttp.ClientTimeout(total=_SHORT_SECONDS)

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return self.fault is None and not self.draining and self.breaker.allows

    @property
    def api(self) -> CompletionsApi | LlamaCppApi:
        """How it is asked."""
        return LlamaCppApi() if self.kind == "llama.cpp" else CompletionsApi(self.kind)

    async def pieces(self, call: Call, *, short: bool = False) -> AsyncGenerator[Piece, None]:
        """Send a call; yield what its answers consist of. Closing the generator cancels it.

        Args:
            call: what to ask.
            short: whether the whole answer has to come within seconds.

        Raises:
            UpstreamFailedError: it can't be reached, or doesn't answer as it should.
            InvalidRequestError: it refuses what the client has asked for.
        """
        api = self.api
        limits = self._limits if short else self._timeout
        with self._counted():
            try:
                async with await self._post(api.path, api.body(call), limits) as response:
                    if response.status != 200:
                        raise await _refusal(response, api.path)
                    kind = response.content_type
                    if kind != "text/event-stream":
                        raise UpstreamFailedError(
                            f"answers {api.path} with {kind} instead of a stream of events; does"
                            " it speak this API? (--upstream-api)"
                        )
                    async for event in read_events(response.content.iter_any()):
                        for piece in api.pieces(event):
                            yield piece
            except _BROKEN as error:
                raise UpstreamFailedError(self._reason(error)) from None

    @contextlib.asynccontextmanager
    async def relay(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send a request; give its response as it comes, what a client has done wrong included.

        Raises:
            UpstreamFailedError: it can't be reached, or doesn't answer.
        """
        with self._counted():
            try:
                response = await self._post(path, body, self._timeout)
            except _BROKEN as error:
                raise UpstreamFailedError(self._reason(error)) from None
            async with response:
                if response.status in (401, 403, 429) or response.status >= 500:
                    raise await _refusal(response, path)
                yield response

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request while it is in progress, and record what becomes of it."""
        self.running += 1
        self.requests += 1
        self.breaker.record_sent()
        try:
            yield
            self.breaker.record_success()
        except UpstreamFailedError as failure:
            self.record_failure(failure)
            raise
        except InvalidRequestError:
            self.breaker.record_success()
            raise
        finally:
            self.running -= 1
            self.breaker.record_given_up()

    async def _post(
        self, path: str, body: Mapping[str, Any], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        return await post(
            self._session,
            self.address + path,
            data=msgspec.json.encode(body),
            headers=_JSON,
            timeout=limits,
        )

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON that it has at a path, or its answer to a body; None if there is nothing.

        Raises:
            UpstreamFailedError: it can't be reached, refuses the key, or sends no JSON.
        """
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                self.address + path,
                data=data,
                headers=_JSON,
                timeout=self._limits,
            ) as response:
                if response.status in (401, 403):
                    raise await _refusal(response, path)
                if response.status >= 500:
                    raise UpstreamFailedError(f"answers {path} with status {response.status}")
                if response.status != 200:
                    return None
                return msgspec.json.decode(await response.content.read(16_000_000))
        except msgspec.DecodeError:
            raise UpstreamFailedError(f"answers {path} with what is no JSON") from None
        except _BROKEN as error:
            raise self._unanswered(error) from None

    async def text(self, path: str) -> str:
        """Return the text that it has at a path; "" if there is none."""
        try:
            async with self._session.get(self.address + path, timeout=self._limits) as response:
                return await response.text(errors="replace") if response.status == 200 else ""
        except _BROKEN:
            return ""

    async def check_health(self) -> None:
        """Ask whether it is well, and record it.

        Raises:
            UpstreamFailedError: it is not.
        """
        path = _HEALTH.get(self.kind, "/v1/models")
        try:
            async with self._session.get(self.address + path, timeout=self._limits) as response:
                if response.status >= 400:
                    raise UpstreamFailedError(f"answers {path} with status {response.status}")
        except _BROKEN as error:
            raise self._unanswered(error) from None

    def _unanswered(self, error: Exception) -> UpstreamFailedError:
        """Return the failure of a short question; too slow an answer may mean a busy server."""
        slow = isinstance(error, TimeoutError)
        return UpstreamFailedError(self._reason(error, self._limits), busy=slow)

    def record_failure(self, failure: UpstreamFailedError) -> None:
        """Record that it has failed."""
        if not failure.busy:
            self.failures += 1
            self.breaker.record_failure()

    def _reason(self, error: Exception, limits: aiohttp.ClientTimeout | None = None) -> str:
        """Return what went wrong on the way to it, on one line.

        Args:
            error: what was raised.
            limits: how long it had to answer; None is a completion's.
        """
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno
            reason = os.strerror(number) if number is not None and number > 0 else error.os_error
            return f"can't be reached ({reason})"
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            seconds = self._timeout.sock_read if limits is None else limits.total
            return f"has sent nothing for {seconds:g} s"
        if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
            return "closed the connection early"
        text = " ".join(str(error).split())[:200]
        return f"doesn't speak HTTP as it should ({text or type(error).__name__})"


async def _refusal(response: aiohttp.ClientResponse, path: str) -> Exception:
    """Return the error that a status other than 200 means."""
    data = await response.content.read(_MAX_ERROR_BYTES)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = data.decode(errors="replace")
    said = error_text(body.get("error", body) if isinstance(body, dict) else body)
    status = response.status
    if status in (400, 413, 422):
        too_long = any(words in said.lower() for words in _TOO_LONG)
        return InvalidRequestError(
            f"the server behind the gateway refuses the request: {said}",
            param="prompt" if too_long else None,
            code="context_length_exceeded" if too_long else None,
        )
    if status in (401, 403):
        return UpstreamFailedError("refuses the gateway's API key (--upstream-key)")
    if status == 404:
        return UpstreamFailedError(f"has no {path}, or no such model: {said}")
    if status in (429, 503):
        return UpstreamFailedError(f"is overloaded (status {status}): {said}", busy=True)
    return UpstreamFailedError(f"answers {path} with status {status}: {said}")


class Breaker:
    """Spares an upstream that fails, and those who would wait for it.

    After some failures in a row it is *open*: nothing is sent. After a while it is *half open*: one
    request may try. Its success closes the breaker, its failure opens it for twice as long.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._seconds = _MIN_OPEN_SECONDS
        self._opened: float | None = None
        self._trial = False

    @property
    def state(self) -> BreakerState:
        """What it lets pass now."""
        if self._opened is None:
            return "closed"
        return "half-open" if self._clock() - self._opened >= self._seconds else "open"

    @property
    def allows(self) -> bool:
        """Whether a request may be sent."""
        state = self.state
        return state == "closed" or (state == "half-open" and not self._trial)

    @property
    def retry_after(self) -> float:
        """Seconds until a request may be sent; 0 if one may be."""
        if self._opened is None:
            return 0.0
        return max(0.0, self._opened + self._seconds - self._clock())

    def record_sent(self) -> None:
        """Record that a request is being sent: while half open, it is the trial."""
        self._trial = self._opened is not None

    def record_given_up(self) -> None:
        """Record that a request was cancelled, which says nothing."""
        self._trial = False

    def record_success(self) -> None:
        """Record that the upstream has answered."""
        self._failures, self._seconds = 0, _MIN_OPEN_SECONDS
        self._opened, self._trial = None, False

    def record_failure(self) -> None:
        """Record that the upstream could not be reached, or did not answer as it should."""
        self._failures += 1
        if self._opened is not None:
            if not self._trial and self.state == "open":
                return  # sent before it opened
            self._seconds = min(2 * self._seconds, _MAX_OPEN_SECONDS)
        elif self._failures < _MAX_FAILURES:
            return
        self._opened, self._trial = self._clock(), False


class _Attempt:
    """Whether a request was sent over a connection that an earlier one had used."""

    reused = False


def trace_connections() -> aiohttp.TraceConfig:
    """Return what a session needs for ``post``."""

    async def reuse(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if isinstance(context.trace_request_ctx, _Attempt):
            context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reuse)
    return config


async def post(session: aiohttp.ClientSession, url: str, **options: Any) -> aiohttp.ClientResponse:
    """Send a POST, and again as long as kept connections turn out to be closed.

    Servers close connections that were idle for some seconds, llama.cpp's after five. A request
    that is being sent just then gets no answer, and its server has done nothing for it. An HTTP
    client sends only those again that change nothing, which a POST does not say of itself.
    Completions do not.

    Args:
        session: made with ``trace_connections``.
        url: where to.
        options: those of ``session.post``.

    Raises:
        aiohttp.ClientError: there is no answer.
    """
    while True:
        attempt = _Attempt()
        try:
            return await session.post(url, trace_request_ctx=attempt, **options)
        except aiohttp.ClientConnectionError as error:
            if not attempt.reused or isinstance(error, TimeoutError):
                raise


async def read_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of a stream of server-sent events, until it ends.

    Raises:
        UpstreamFailedError: an event is no JSON object, or is endless.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise UpstreamFailedError("sent an endless line")
        for line in lines:
            event = _event(line.strip())
            if event is not None:
                yield event
    event = _event(rest.strip())
    if event is not None:
        yield event


def _event(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds; None if it is a comment, another field, or the end's mark."""
    if line.startswith(_ERROR_FIELD):
        return {"error": _decode(line.removeprefix(_ERROR_FIELD))}
    if not line.startswith(_DATA_FIELD):
        if line and b":" not in line:
            raise UpstreamFailedError("sent a line that is no event in a stream of events")
        return None
    data = line.removeprefix(_DATA_FIELD).strip()
    if data == _DONE or not data:
        return None
    value = _decode(data)
    if not isinstance(value, dict):
        raise UpstreamFailedError("sent an event that is no JSON object")
    return value


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UpstreamFailedError("sent an event that is no JSON") from None
