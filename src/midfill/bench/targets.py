"""What a load runs against: a server somewhere, or a model loaded into this process."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rich.console import Console

from midfill.bench.endpoint import Endpoint, Measurement
from midfill.infill.formats import FimFormat

Sentinels = tuple[str, str, str]

SPARE_TOKENS: Sentinels = ("<filename>", "<gh_stars>", "<issue_start>")
"""Tokens that serve as sentinels where a SmolLM2 without an adapter is measured.

They lay a prompt out like real ones do, which is all that a speed measurement needs.
"""


class Target(Protocol):
    """Answers completion payloads and measures each answer.

    Attributes:
        sentinels: texts of its PRE, SUF and MID tokens; None where nobody knows them.
    """

    sentinels: Sentinels | None

    async def model(self) -> str:
        """Name of the model."""
        ...

    async def complete(self, payload: dict[str, Any]) -> Measurement:
        """Answer one /v1/completions body."""
        ...


class InProcess:
    """A model in this process: the same prompts and engine as the server's, without HTTP."""

    def __init__(
        self, model: str, sentinels: Sentinels | None, threads: int | None, console: Console
    ) -> None:
        from midfill import LLM

        with console.status(f"loading {model}"):
            self._llm = LLM(model, threads=threads, fim_tokens=sentinels)
            if self._llm.fim_format is None:
                self._llm.close()
                self._llm = LLM(model, threads=threads, fim_tokens=SPARE_TOKENS)
        self.sentinels = _texts(self._llm.fim_format)
        self._model = model
        # Callers of an LLM take turns in running its steps, one thread each.
        self._threads = ThreadPoolExecutor(256)

    async def model(self) -> str:
        return self._model

    async def complete(self, payload: dict[str, Any]) -> Measurement:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._measure, payload)

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown()
        self._llm.close()

    def _measure(self, payload: dict[str, Any]) -> Measurement:
        from midfill import SamplingParams

        fields = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
        sampling = SamplingParams(**{name: payload[name] for name in fields if name in payload})
        started = time.perf_counter()
        layout = payload.get("midfill", {}).get("layout", "auto")
        suffix = payload.get("suffix", "")
        stream = self._llm.infill_stream(payload["prompt"], suffix, sampling, layout=layout)
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


def _texts(format: FimFormat | None) -> Sentinels | None:
    """PRE, SUF and MID where a format has all three in that order."""
    if format is None or format.order != "psm" or format.middle is None:
        return None
    return format.prefix.text, format.suffix.text, format.middle.text


@asynccontextmanager
async def open_target(
    url: str | None,
    model: str | None,
    sentinels: Sentinels | None,
    threads: int | None,
    console: Console,
) -> AsyncIterator[Target]:
    """The server at ``url``, or else ``model`` (the default one) in this process.

    Raises:
        MidfillError: no server there, or no such model.
    """
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    if url is not None:
        async with Endpoint(url) as endpoint:
            endpoint.sentinels = sentinels
            yield endpoint
        return
    target = InProcess(model or DEFAULT_MODEL, sentinels, threads, console)
    try:
        yield target
    finally:
        target.close()
