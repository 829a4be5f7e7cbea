"""What is evaluated: a model loaded here, or one behind an OpenAI-style completions API."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout
from midfill.infill.request import InfillRequest
from midfill.system.extras import require
from midfill.system.progress import StageProgress

if TYPE_CHECKING:
    import httpx

    from midfill.llm import LLM

Ask = PromptLayout | InfillRequest

_CONNECTIONS = 32
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote.

    Attributes:
        text: healed bytes left out.
        ended: by a stop token, not by the limit.
    """

    text: str
    ended: bool


class Model(Protocol):
    """Answers prompts greedily.

    Attributes:
        format: its FIM format, if it has one.
        description: of what computed the answers, for the record.
        remote: it takes prompts as text only.
    """

    format: FimFormat | None
    description: str
    remote: bool

    def answer(
        self, prompts: Sequence[Ask], max_tokens: int, healing: bool, progress: StageProgress
    ) -> list[Answer]:
        """One answer a prompt, in order; ``progress`` hears (answered, total)."""
        ...


class LocalModel:
    """A model in this process: all prompts of a call share the engine's steps."""

    remote = False

    def __init__(self, llm: "LLM", name: str) -> None:
        self._llm = llm
        self.format = llm.fim_format
        adapter = "no adapter" if llm.info.adapter is None else f"adapter {llm.info.adapter}"
        self.description = f"{name}, {adapter}, {llm.info.backend}"

    def answer(
        self, prompts: Sequence[Ask], max_tokens: int, healing: bool, progress: StageProgress
    ) -> list[Answer]:
        """See ``Model``."""
        from midfill.frontend.sampling import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        results = self._llm.infill_all(prompts, sampling, healing=healing, progress=progress)
        return [
            Answer(result.text, result.answers[0].finish_reason == "stop") for result in results
        ]


class RemoteModel:
    """A model behind ``base_url`` (which ends in ``/v1``). Layouts are sent as text.

    The server's end tokens end an answer. A FIM token that a model writes, which ends it in
    ``LocalModel``, need not.
    """

    remote = True

    def __init__(self, base_url: str, sentinels: tuple[str, str, str] | None) -> None:
        """Ask who is there.

        Raises:
            MidfillError: nobody is.
        """
        require("--url", ["httpx"], extra="bench")
        import httpx

        self._base_url = base_url.rstrip("/")
        self.format = None if sentinels is None else _spelled(sentinels)
        try:
            response = httpx.get(f"{self._base_url}/models", timeout=30)
            response.raise_for_status()
            self._name = str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
            raise MidfillError(f"no OpenAI-style server at {base_url}: {error}") from None
        self.description = f"{self._name} at {self._base_url}"

    def answer(
        self, prompts: Sequence[Ask], max_tokens: int, healing: bool, progress: StageProgress
    ) -> list[Answer]:
        """See ``Model``; the server alone decides about healing."""
        payloads = [self._payload(prompt, max_tokens) for prompt in prompts]
        return asyncio.run(self._answer_all(payloads, progress))

    def _payload(self, prompt: Ask, max_tokens: int) -> dict[str, Any]:
        body = {"model": self._name, "max_tokens": max_tokens, "temperature": 0}
        if isinstance(prompt, InfillRequest):
            return {**body, "prompt": prompt.prefix, "suffix": prompt.suffix}
        text = "".join(segment.text for segment in prompt.segments)
        return {**body, "prompt": text, "midfill": {"layout": "verbatim"}}

    async def _answer_all(
        self, payloads: Sequence[dict[str, Any]], progress: StageProgress
    ) -> list[Answer]:
        import httpx

        free = asyncio.Semaphore(_CONNECTIONS)
        answered = 0

        async def ask(client: httpx.AsyncClient, payload: dict[str, Any]) -> Answer:
            nonlocal answered
            async with free:
                answer = await self._ask(client, payload)
            answered += 1
            progress(answered, len(payloads))
            return answer

        limits = httpx.Limits(max_connections=_CONNECTIONS)
        async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, limits=limits) as client:
            return await asyncio.gather(*(ask(client, payload) for payload in payloads))

    async def _ask(self, client: "httpx.AsyncClient", payload: dict[str, Any]) -> Answer:
        import httpx

        try:
            response = await client.post(f"{self._base_url}/completions", json=payload)
        except httpx.HTTPError as error:
            raise MidfillError(f"{self._base_url} broke off: {error!r}") from None
        if response.status_code != 200:
            detail = " ".join(response.text.split())[:300]
            raise MidfillError(f"{self._base_url} answered {response.status_code}: {detail}")
        try:
            choice = response.json()["choices"][0]
            return Answer(choice["text"] or "", choice["finish_reason"] == "stop")
        except (LookupError, TypeError, ValueError) as error:
            raise MidfillError(f"{self._base_url} sent no completion: {error!r}") from None


def _spelled(sentinels: tuple[str, str, str]) -> FimFormat:
    """A format for laying out prompts as text; nobody looks at its token ids."""
    prefix, suffix, middle = (Sentinel(text, -1) for text in sentinels)
    return FimFormat("custom", prefix, suffix, middle)
