"""Upstream: one server behind the gateway, its load and its health."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec

from midfill.engine.routing import DEFAULT_SLOTS
from midfill.errors import InvalidRequestError
from midfill.serving.gateway.breaker import Breaker
from midfill.serving.gateway.calls import Call, Piece, UpstreamApi, UpstreamFailedError
from midfill.serving.gateway.event_stream import read_events
from midfill.serving.gateway.kept_connections import post
from midfill.serving.gateway.llama_cpp_api import LlamaCppApi
from midfill.serving.gateway.openai_api import CompletionsApi, error_text

ApiName = Literal["auto", "vllm", "sglang", "llama.cpp", "midfill", "openai"]
Kind = Literal["vllm", "sglang", "llama.cpp", "midfill", "openai"]

_MAX_ERROR_BYTES = 65_536
_SHORT_SECONDS = 10  # for questions that need no model
_JSON = {"content-type": "application/json"}
_HEALTH = dict.fromkeys(("vllm", "sglang", "llama.cpp", "midfill"), "/health")
_TOO_LONG = ("context length", "context size", "maximum context", "context_length", "too long")


@dataclass(frozen=True, slots=True)
class Relayed:
    """A response that is passed on.

    Attributes:
        status, content_type: of the response.
        chunks: its body.
    """

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]


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
    def api(self) -> UpstreamApi:
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
        self.running += 1
        self.requests += 1
        self.breaker.record_sent()
        try:
            limits = self._limits if short else self._timeout
            async with self._post(api.path, api.body(call), limits) as response:
                kind = response.content_type
                if kind != "text/event-stream":
                    raise UpstreamFailedError(
                        f"answers {api.path} with {kind} instead of a stream of events; does it"
                        " speak this API? (--upstream-api)"
                    )
                async for event in read_events(response.content.iter_any()):
                    for piece in api.pieces(event):
                        yield piece
            self.breaker.record_success()
        except UpstreamFailedError as failure:
            self.record_failure(failure)
            raise
        except InvalidRequestError:
            self.breaker.record_success()
            raise
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            broken = UpstreamFailedError(self._reason(error))
            self.record_failure(broken)
            raise broken from None
        finally:
            self.running -= 1
            self.breaker.record_given_up()

    @contextlib.asynccontextmanager
    async def relay(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Relayed, None]:
        """Send a request; give its response as it comes, what a client has done wrong included.

        Raises:
            UpstreamFailedError: it can't be reached, or doesn't answer.
        """
        self.running += 1
        self.requests += 1
        self.breaker.record_sent()
        try:
            async with await self._answer(path, body) as response:
                yield Relayed(response.status, response.content_type, response.content.iter_any())
            self.breaker.record_success()
        except UpstreamFailedError as failure:
            self.record_failure(failure)
            raise
        finally:
            self.running -= 1
            self.breaker.record_given_up()

    async def _answer(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """Return the response to a request, unless it shows that the upstream has failed."""
        try:
            response = await post(
                self._session,
                self.address + path,
                data=msgspec.json.encode(body),
                headers=_JSON,
                timeout=self._timeout,
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise UpstreamFailedError(self._reason(error)) from None
        if response.status in (401, 403, 429) or response.status >= 500:
            async with response:
                raise await _refusal(response, path)
        return response

    async def get(self, path: str) -> Any:
        """Return the JSON that it has at a path; None if there is nothing.

        Raises:
            UpstreamFailedError: it can't be reached, refuses the key, or sends no JSON.
        """
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return its JSON answer; None if there is nothing. Raises what ``get`` does."""
        return await self._json("POST", path, body)

    async def text(self, path: str) -> str:
        """Return the text that it has at a path; "" if there is none."""
        try:
            async with self._session.get(self.address + path, timeout=self._limits) as response:
                return await response.text(errors="replace") if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
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
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unanswered(error) from None

    @contextlib.asynccontextmanager
    async def _post(
        self, path: str, body: Mapping[str, Any], limits: aiohttp.ClientTimeout
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        async with await post(
            self._session,
            self.address + path,
            data=msgspec.json.encode(body),
            headers=_JSON,
            timeout=limits,
        ) as response:
            if response.status != 200:
                raise await _refusal(response, path)
            yield response

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                method, self.address + path, data=data, headers=_JSON, timeout=self._limits
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
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
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
