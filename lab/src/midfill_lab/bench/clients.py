"""Clients that a load runs with: of a server somewhere, or of a model loaded into this process."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat

Sentinels = tuple[str, str, str]
"""Texts of a model's PRE, SUF and MID tokens."""

SPARE_TOKENS: Sentinels = ("<filename>", "<gh_stars>", "<issue_start>")
"""Tokens that stand in for sentinels where a SmolLM2 without an adapter is measured.

They lay a prompt out as real ones do, which is all that a speed measurement needs.
"""


class Measurement(msgspec.Struct, frozen=True):
    """A request's times and token counts, measured by the client.

    Attributes:
        ttft_seconds: from sending the request to its first token.
        total_seconds: from sending the request to the end of the answer.
        prompt_tokens, cached_tokens, completion_tokens: the server's usage.
        text: the completion.
        arrivals: when each message with text arrived, in seconds of ``time.perf_counter``; empty
            for a model in this process.
    """

    ttft_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    text: str
    arrivals: tuple[float, ...] = ()

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens


class Exchange(NamedTuple):
    """A request's response; times are of ``time.perf_counter``.

    Attributes:
        status: of HTTP.
        started, ended: when the request was sent, and when the response was complete.
        parts: of the response's body, each with the time at which it arrived.
    """

    status: int
    started: float
    ended: float
    parts: list[tuple[float, bytes]]


class HttpClient:
    """A client of an OpenAI-style server; requests are streamed, and each answer is measured.

    Attributes:
        base_url: of the server, ending in ``/v1``.
        sentinels: the model's; set by whoever knows them.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/")
        self.sentinels: Sentinels | None = None
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=timeout,
            # A connection per request: a server may close an idle one just as it is reused.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """Return the name of the first model served.

        Raises:
            MidfillError: no OpenAI-style server answers.
        """
        try:
            response = await self._client.get("/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise MidfillError(f"no OpenAI-style server at {self.base_url}: {error}") from error

    async def exchange(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Exchange:
        """Send a request and follow its response to the end, whatever it is.

        Args:
            path: after the base URL.
            body: of the request.
            headers: beside the client's own.

        Raises:
            MidfillError: there is no response, or it breaks off.
        """
        started = time.perf_counter()
        parts: list[tuple[float, bytes]] = []
        try:
            async with self._client.stream("POST", path, json=body, headers=headers) as response:
                # Decoded later: the server shares its cores with this process.
                async for part in response.aiter_bytes():
                    parts.append((time.perf_counter(), part))
        except httpx.HTTPError as error:
            raise MidfillError(f"{self.base_url} broke off: {error!r}") from error
        return Exchange(response.status_code, started, time.perf_counter(), parts)

    async def complete(self, payload: dict[str, Any]) -> Measurement:
        """Send the body of a /v1/completions request and measure the answer.

        Raises:
            MidfillError: the server refuses the request, or the answer breaks off.
        """
        body = {**payload, "stream": True, "stream_options": {"include_usage": True}}
        status, started, ended, parts = await self.exchange("/completions", body)
        if status != 200:
            detail = b"".join(part for _, part in parts).decode(errors="replace")
            raise MidfillError(f"{self.base_url} answered {status}: {detail}")
        arrivals: list[float] = []
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        for arrived, event in stream_events(parts):
            if event.get("choices"):
                arrivals.append(arrived)
                pieces.append(event["choices"][0].get("text") or "")
            usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Measurement(
            ttft_seconds=(arrivals[0] if arrivals else ended) - started,
            total_seconds=ended - started,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens", 0)),
            text="".join(pieces),
            arrivals=tuple(arrivals),
        )


class InProcessClient:
    """A model in this process, asked as ``HttpClient`` asks: prompts and engine, without HTTP.

    A model without FIM tokens is loaded with ``SPARE_TOKENS`` unless ``sentinels`` are given.
    ``method`` compresses the KV of every prompt.
    """

    def __init__(
        self,
        model: str,
        sentinels: Sentinels | None,
        threads: int | None,
        console: Console,
        method: str = "none",
    ) -> None:
        from midfill import LLM

        with console.status(f"loading {model}"):
            self._llm = LLM(model, threads=threads, fim_tokens=sentinels, method=method)
            if self._llm.fim_format is None:
                self._llm.close()
                self._llm = LLM(model, threads=threads, fim_tokens=SPARE_TOKENS, method=method)
        self.sentinels = _texts(self._llm.fim_format)
        self._model = model
        # Callers of an LLM take turns at running its steps; each needs a thread.
        self._threads = ThreadPoolExecutor(256)

    async def model(self) -> str:
        return self._model

    async def complete(self, payload: dict[str, Any]) -> Measurement:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._measure, payload)

    def close(self) -> None:
        """End the model and its threads."""
        self._threads.shutdown()
        self._llm.close()

    def _measure(self, payload: dict[str, Any]) -> Measurement:
        from midfill import SamplingParams

        names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
        sampling = SamplingParams(**{name: payload[name] for name in names if name in payload})
        started = time.perf_counter()
        fields, suffix = payload.get("midfill", {}), payload.get("suffix", "")
        stream = self._llm.infill_stream(
            payload["prompt"],
            suffix,
            sampling,
            layout=fields.get("layout", "auto"),
            window=fields.get("window", "stable"),
        )
        first: float | None = None
        pieces = []
        for delta in stream:
            first = first or time.perf_counter()
            pieces.append(delta.text)
        ended = time.perf_counter()
        return Measurement(
            ttft_seconds=(first or ended) - started,
            total_seconds=ended - started,
            prompt_tokens=stream.usage.prompt_tokens,
            cached_tokens=stream.usage.cached_tokens,
            completion_tokens=stream.usage.completion_tokens,
            text="".join(pieces),
        )


Client = HttpClient | InProcessClient


@asynccontextmanager
async def open_client(
    url: str | None,
    model: str | None,
    sentinels: Sentinels | None,
    threads: int | None,
    console: Console,
    method: str = "none",
) -> AsyncIterator[Client]:
    """Yield a client of the server at ``url``, or else of ``model`` loaded into this process.

    Args:
        url: of an OpenAI-style server, ending in ``/v1``.
        model: name or path; None takes the default model.
        sentinels: the model's, where the user names them.
        threads: of a model in this process.
        console: shows that the model is being loaded.
        method: compresses the KV of every prompt of a model in this process.

    Raises:
        MidfillError: no server there, or no such model.
    """
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    if url is not None:
        async with HttpClient(url) as http_client:
            http_client.sentinels = sentinels
            yield http_client
        return
    client = InProcessClient(model or DEFAULT_MODEL, sentinels, threads, console, method)
    try:
        yield client
    finally:
        client.close()


def _texts(format: FimFormat | None) -> Sentinels | None:
    """Return PRE, SUF and MID if a format has all three, in that order."""
    if format is None or format.order != "psm" or format.middle is None:
        return None
    return format.prefix.text, format.suffix.text, format.middle.text


def stream_events(parts: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield server-sent events, each with the time at which its last byte arrived."""
    rest = b""
    for arrived, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield arrived, json.loads(data)
