"""Evaluated models: one loaded in this process, or one behind an OpenAI-style completions API."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from midfill.errors import MidfillError
from midfill.infill.cut_places import KeepsTokens, keeps_any_tokens
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout
from midfill.infill.request import InfillRequest
from midfill.models.tokens.tokenizer import keeps_tokens_of
from midfill.system.extras import require
from midfill.system.progress import StageProgress

if TYPE_CHECKING:
    import httpx

    from midfill.llm import LLM

_MAX_CONNECTIONS = 32
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer.

    Attributes:
        text: the text after the caret.
        ended: whether it ended with a stop token, not at the maximum length.
        empty_probability: how probable an empty answer was, where the prompt has a threshold of its
            own; an upper bound where that is not above it.
    """

    text: str
    ended: bool
    empty_probability: float | None = None


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """A prompt for a model.

    Attributes:
        text: a layout, or a request that midfill lays out itself.
        healing: whether a layout is answered with token healing.
        group: prompts of a group have much text in common.
        empty_threshold: see ``EngineRequest``; None takes what the model says.
        method: compresses the prompt's KV, see ``EngineRequest``.
    """

    text: PromptLayout | InfillRequest
    healing: bool = False
    group: str = ""
    empty_threshold: float | None = None
    method: str | None = None


class Model(Protocol):
    """Answers prompts greedily.

    Attributes:
        format: its FIM format, None if it has none.
        description: the model and what computes its answers, for the report.
        fingerprint: digest of what decides its answers; "" if it is unknown.
        remote: whether it takes prompts as text only.
        keeps_tokens: where its tokenizer allows a cut.
    """

    format: FimFormat | None
    description: str
    fingerprint: str
    remote: bool
    keeps_tokens: KeepsTokens

    def answer(
        self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
    ) -> list[Answer]:
        """Return one answer per prompt, in order.

        Args:
            prompts: what to answer.
            max_tokens: of each answer.
            progress: called with (answered, total).

        Raises:
            MidfillError: a prompt is too long, or the server failed.
        """
        ...

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """Return the prompt tokens that each request computes; all are asked at once.

        Raises:
            MidfillError: a prompt is too long, or nobody counts them.
        """
        ...


class LocalModel:
    """A model in this process; all prompts of a call are batched."""

    remote = False

    def __init__(self, llm: "LLM", name: str) -> None:
        self._llm = llm
        self.format = llm.fim_format
        adapter = "no adapter" if llm.info.adapter is None else f"adapter {llm.info.adapter}"
        backend, _, _ = llm.info.backend.partition(",")  # answers don't depend on threads
        self.description = f"{name}, {adapter}, {backend}"
        self.keeps_tokens: KeepsTokens = keeps_tokens_of(llm.tokenizer)
        self.fingerprint = llm.fingerprint

    def answer(
        self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
    ) -> list[Answer]:
        """See ``Model``."""
        from midfill.frontend.sampling import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        results = self._llm.infill_all(
            [prompt.text for prompt in prompts],
            sampling,
            healing=[prompt.healing for prompt in prompts],
            empty_threshold=[prompt.empty_threshold for prompt in prompts],
            method=[prompt.method for prompt in prompts],
            progress=progress,
        )
        return [
            Answer(
                result.text,
                result.answers[0].finish_reason == "stop",
                None if prompt.empty_threshold is None else result.empty_probability,
            )
            for prompt, result in zip(prompts, results, strict=True)
        ]

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """See ``Model``."""
        from midfill.frontend.sampling import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        results = self._llm.infill_all(requests, sampling)
        return [result.usage.computed_tokens for result in results]


class RemoteModel:
    """A model behind a URL. Layouts are sent as text; healing and empty answers are the server's.

    An answer ends with the server's end tokens. These need not include the FIM tokens, which end
    answers of ``LocalModel``.

    Args:
        base_url: ends with ``/v1``.
        sentinels: PRE, SUF and MID, to lay out prompts here; None asks without sentinels.

    Raises:
        MidfillError: there is no such server.
    """

    remote = True
    fingerprint = ""

    def __init__(self, base_url: str, sentinels: tuple[str, str, str] | None) -> None:
        require("--url", ["httpx"], extra="bench")
        import httpx

        self._base_url = base_url.rstrip("/")
        self.format = None if sentinels is None else _text_format(sentinels)
        self.keeps_tokens: KeepsTokens = keeps_any_tokens
        try:
            response = httpx.get(f"{self._base_url}/models", timeout=30)
            response.raise_for_status()
            self._name = str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
            raise MidfillError(f"no OpenAI-style server at {base_url}: {error}") from None
        self.description = f"{self._name} at {self._base_url}"

    def answer(
        self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
    ) -> list[Answer]:
        """See ``Model``."""
        payloads = [self._payload(prompt, max_tokens) for prompt in prompts]
        return asyncio.run(self._answer_all(payloads, progress))

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """See ``Model``."""
        raise MidfillError("tokens are counted by a model that is loaded here, not behind a URL")

    def _payload(self, prompt: ModelPrompt, max_tokens: int) -> dict[str, Any]:
        body = {"model": self._name, "max_tokens": max_tokens, "temperature": 0}
        method = {} if prompt.method is None else {"method": prompt.method}
        if isinstance(prompt.text, InfillRequest):
            # The text that the other conditions have; other servers ignore the field.
            window = {"window": "as-sent"} if prompt.text.window == "as-sent" else {}
            asked = {"prompt": prompt.text.prefix, "suffix": prompt.text.suffix}
            return {**body, **asked, "midfill": {**window, **method}}
        text = "".join(segment.text for segment in prompt.text.segments)
        return {**body, "prompt": text, "midfill": {"layout": "verbatim", **method}}

    async def _answer_all(
        self, payloads: Sequence[dict[str, Any]], progress: StageProgress
    ) -> list[Answer]:
        import httpx

        free = asyncio.Semaphore(_MAX_CONNECTIONS)
        answered = 0

        async def ask(client: httpx.AsyncClient, payload: dict[str, Any]) -> Answer:
            nonlocal answered
            async with free:
                answer = await self._ask(client, payload)
            answered += 1
            progress(answered, len(payloads))
            return answer

        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS)
        async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, limits=limits) as client:
            return await asyncio.gather(*(ask(client, payload) for payload in payloads))

    async def _ask(self, client: "httpx.AsyncClient", payload: dict[str, Any]) -> Answer:
        import httpx

        try:
            response = await client.post(f"{self._base_url}/completions", json=payload)
        except httpx.HTTPError as error:
            raise MidfillError(f"{self._base_url} failed: {error!r}") from None
        if response.status_code != 200:
            detail = " ".join(response.text.split())[:300]
            raise MidfillError(f"{self._base_url} answered {response.status_code}: {detail}")
        try:
            choice = response.json()["choices"][0]
            return Answer(choice["text"] or "", choice["finish_reason"] == "stop")
        except (LookupError, TypeError, ValueError) as error:
            raise MidfillError(f"{self._base_url} sent no completion: {error!r}") from None


def _text_format(sentinels: tuple[str, str, str]) -> FimFormat:
    """Return a format for laying out prompts as text; its token ids are not used."""
    prefix, suffix, middle = (Sentinel(text, -1) for text in sentinels)
    return FimFormat("custom", prefix, suffix, middle)
