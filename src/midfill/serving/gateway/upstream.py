"""Upstream: one server behind the gateway, its load and its health."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

from midfill.engine.routing import DEFAULT_SLOTS
from midfill.errors import InvalidRequestError
from midfill.serving.gateway.breaker import Breaker
from midfill.serving.gateway.upstream_api import (
    Call,
    CompletionsApi,
    LlamaCppApi,
    Piece,
    RelayedEvent,
    UpstreamFailedError,
    error_text,
    relayed_event,
)
from midfill.serving.gateway.upstream_http import (
    BROKEN,
    decode,
    ends_stream,
    limited,
    read_chunks,
    read_data,
    read_events,
    read_start,
    read_whole,
    send,
)

Kind = Literal["vllm", "sglang", "llama.cpp", "midfill", "openai"]

_MAX_ERROR_BYTES = 65_536
_MAX_DESCRIPTION_BYTES = 2_000_000  # of what it says of itself
_MAX_CHAT_BYTES = 16_000_000  # of a chat's answer in one piece
_MAX_TOKEN_BYTES = 2048  # of a token's part of a stream of events, its JSON included
_OTHER_BYTES = 2**20  # of such a stream; llama.cpp also repeats the prompt
_EVENTS_AT_ONCE = 64  # that are passed on before anything else is done
_SHORT_SECONDS = 10  # for questions that need no model
_EVENTS, _WHOLE = "text/event-stream", "application/json"
_JSON = {"content-type": _WHOLE}
_HEALTH = dict.fromkeys(("vllm", "sglang", "llama.cpp", "midfill"), "/health")
_TOO_LONG = ("context length", "context size", "maximum context", "context_length", "too long")


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
        with self._counted(), self._translated(limits):
            async with await self._post(api.path, api.body(call), limits) as response:
                if response.status != 200:
                    raise await _refusal(response, api.path, limits)
                _check_kind(response, _EVENTS, api.path)
                chunks = limited(read_chunks(response, limits), _allowed_bytes(call))
                async for event in read_events(chunks):
                    for piece in api.pieces(event):
                        yield piece

    async def relay(
        self, path: str, body: Mapping[str, Any], *, streamed: bool
    ) -> AsyncGenerator[RelayedEvent, None]:
        """Send a body that a client has made; yield what comes, as it is. Closing cancels it.

        Args:
            path: where to POST.
            body: what.
            streamed: whether it asks for a stream of events; otherwise one object is yielded.

        Raises:
            UpstreamFailedError: it can't be reached, or doesn't answer as it should.
            InvalidRequestError: it refuses the body.
        """
        with self._counted(), self._translated(self._timeout):
            async with await self._post(path, body, self._timeout) as response:
                if response.status != 200:
                    raise await _refusal(response, path, self._timeout, client_made=True)
                _check_kind(response, _EVENTS if streamed else _WHOLE, path)
                if not streamed:
                    yield relayed_event(await read_whole(response, self._timeout, _MAX_CHAT_BYTES))
                    return
                count = 0
                async for data in read_data(read_chunks(response, self._timeout)):
                    if ends_stream(data):
                        return
                    yield relayed_event(data)
                    count += 1
                    if count % _EVENTS_AT_ONCE == 0:
                        await asyncio.sleep(0)  # thousands may have come at once
                raise UpstreamFailedError("ended the stream before the answer's end")

    @contextlib.contextmanager
    def _translated(self, limits: aiohttp.ClientTimeout) -> Iterator[None]:
        """Raise what a connection raises as a failure."""
        try:
            yield
        except BROKEN as error:
            raise UpstreamFailedError(self._reason(error, limits)) from None

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
        data = await asyncio.to_thread(msgspec.json.encode, body)  # chats may be long
        return await send(
            self._session, "POST", self.address + path, data=data, headers=_JSON, timeout=limits
        )

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        max_bytes: int = _MAX_DESCRIPTION_BYTES,
    ) -> Any:
        """Return the JSON that it has at a path, or its answer to a body; None if there is nothing.

        Raises:
            UpstreamFailedError: it can't be reached, refuses the key, sends no JSON or too much.
        """
        data = None if body is None else msgspec.json.encode(body)
        method = "GET" if body is None else "POST"
        try:
            async with await send(
                self._session, method, self.address + path,
                data=data, headers=_JSON, timeout=self._limits,
            ) as response:  # fmt: skip
                if response.status in (401, 403):
                    raise await _refusal(response, path, self._limits)
                if response.status >= 500:
                    raise UpstreamFailedError(f"answers {path} with status {response.status}")
                if response.status != 200:
                    return None
                content = await read_whole(response, self._limits, max_bytes)
        except BROKEN as error:
            raise self._unanswered(error) from None
        return decode(content, f"answers {path} with what is no JSON")

    async def text(self, path: str) -> str:
        """Return the text that it has at a path, the start of a long one; "" if there is none."""
        url = self.address + path
        try:
            async with await send(self._session, "GET", url, timeout=self._limits) as response:
                if response.status != 200:
                    return ""
                content = await read_start(response, self._limits, _MAX_DESCRIPTION_BYTES)
        except (*BROKEN, UpstreamFailedError):
            return ""
        return content.decode(errors="replace")

    async def check_health(self) -> None:
        """Ask whether it is well, and record it.

        Raises:
            UpstreamFailedError: it is not.
        """
        path = _HEALTH.get(self.kind, "/v1/models")
        url = self.address + path
        try:
            async with await send(self._session, "GET", url, timeout=self._limits) as response:
                if response.status >= 400:
                    raise UpstreamFailedError(f"answers {path} with status {response.status}")
        except BROKEN as error:
            raise self._unanswered(error) from None

    def _unanswered(self, error: Exception) -> UpstreamFailedError:
        """Return the failure of a short question; too slow an answer may mean a busy server."""
        slow = isinstance(error, TimeoutError)
        return UpstreamFailedError(self._reason(error, self._limits), busy=slow)

    def record_failure(self, failure: UpstreamFailedError) -> None:
        """Record that it has failed."""
        if failure.busy:
            return
        self.failures += 1
        if not failure.client_made:
            self.breaker.record_failure()

    def _reason(self, error: Exception, limits: aiohttp.ClientTimeout) -> str:
        """Return what went wrong on the way to it, on one line.

        Args:
            error: what was raised.
            limits: how long it had to answer.
        """
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno
            reason = os.strerror(number) if number is not None and number > 0 else error.os_error
            return f"can't be reached ({reason})"
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            seconds = limits.total or limits.sock_read
            return f"has sent nothing for {seconds:g} s"
        if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
            return "closed the connection early"
        if isinstance(error, aiohttp.ClientResponseError):
            return "doesn't speak HTTP as it should"  # its text may quote an answer
        text = " ".join(str(error).split())[:200]
        return f"doesn't speak HTTP as it should ({text or type(error).__name__})"


def _check_kind(response: aiohttp.ClientResponse, wanted: str, path: str) -> None:
    """Refuse an answer of another kind than the one that was asked for.

    Raises:
        UpstreamFailedError: it is one.
    """
    kind = response.content_type
    if kind != wanted:
        name = "a stream of events" if wanted == _EVENTS else "JSON"
        raise UpstreamFailedError(
            f"answers {path} with {error_text(kind[:80])} instead of {name}; does it speak this"
            " API? (--upstream-api)"
        )


def _allowed_bytes(call: Call) -> int:
    """Return how many bytes the events of a call's answers may have."""
    tokens = call.answers * (call.sampling.max_tokens + 1)
    return _OTHER_BYTES + 8 * len(call.prompt) + _MAX_TOKEN_BYTES * tokens


async def _refusal(
    response: aiohttp.ClientResponse,
    path: str,
    limits: aiohttp.ClientTimeout,
    *,
    client_made: bool = False,
) -> Exception:
    """Return the error that a status other than 200 means.

    Args:
        response: what was answered.
        path: where.
        limits: how long the rest of it may take.
        client_made: whether the body was a client's own. Then its status says nothing of the
            server's health: otherwise a client could have a server spared that others need.
    """
    data = await read_start(response, limits, _MAX_ERROR_BYTES)
    try:
        body = decode(data, "")
    except UpstreamFailedError:
        body = data.decode(errors="replace")
    said = error_text(body.get("error", body) if isinstance(body, dict) else body)
    status = response.status
    if status in (400, 413, 422) or (client_made and status in (405, 409, 410, 415, 501)):
        too_long = any(words in said.lower() for words in _TOO_LONG)
        return InvalidRequestError(
            f"the server behind the gateway refuses the request: {said}",
            param="prompt" if too_long else None,
            code="context_length_exceeded" if too_long else None,
        )
    if status in (401, 403):
        return UpstreamFailedError("refuses the gateway's API key (--upstream-key)")
    if status == 404:
        message = f"has no {path}, or no such model: {said}"
        return UpstreamFailedError(message, client_made=client_made)
    if status in (429, 503):
        return UpstreamFailedError(f"is overloaded (status {status}): {said}", busy=True)
    message = f"answers {path} with status {status}: {said}"
    return UpstreamFailedError(message, client_made=client_made)
