"""Evaluated models: loaded here, in one process or several, or behind a completions API."""

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Protocol, Self

from midfill.config import Backend, KVCacheDtypeName, WeightsOption
from midfill.errors import MidfillError
from midfill.frontend.prompt_encoder import fingerprint_of
from midfill.infill.confidence import Features
from midfill.infill.cut_places import KeepsTokens, keeps_any_tokens
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.models.tokens.tokenizer import keeps_tokens_of
from midfill.system.machine import available_threads
from midfill.system.progress import Progress, StageProgress, ignore_progress
from midfill.system.python_child import libraries_start_python

if TYPE_CHECKING:
    import httpx

    from midfill.frontend.confidence import Confidence
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
        confidence: how sure it is, if that was asked for; features are known of models loaded here.
    """

    text: str
    ended: bool
    empty_probability: float | None = None
    confidence: "AnswerEvidence | None" = None


@dataclass(frozen=True, slots=True)
class AnswerEvidence:
    """How sure an answer is.

    Attributes:
        estimate: that its first line is right; None where the model has no rule.
        start, line: the features that estimates are made of; None behind a URL.
    """

    estimate: float | None
    start: Features | None = None
    line: Features | None = None


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """A prompt for a model.

    Attributes:
        text: a layout, or a request that midfill lays out itself.
        healing: whether a layout is answered with token healing.
        group: prompts of a group have much text in common.
        empty_threshold: see ``EngineRequest``; None takes what the model says.
        method: compresses the prompt's KV, see ``EngineRequest``.
        judged: whether to report how sure the answer is.
        candidates: how many answers to try, see ``SamplingParams``.
    """

    text: PromptLayout | InfillRequest
    healing: bool = False
    group: str = ""
    empty_threshold: float | None = None
    method: str | None = None
    judged: bool = False
    candidates: int = 1


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

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """Return the prompt tokens that each request computes; all are asked at once.

        Raises:
            MidfillError: a prompt is too long, or nobody counts them.
        """


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
        answers: dict[int, Answer] = {}
        # All prompts of a call to infill_all have as many candidates.
        for candidates in dict.fromkeys(prompt.candidates for prompt in prompts):
            places = [place for place, each in enumerate(prompts) if each.candidates == candidates]
            given = self._answer_with(
                candidates,
                [prompts[place] for place in places],
                max_tokens,
                lambda done, _: progress(len(answers) + done, len(prompts)),
            )
            answers.update(zip(places, given, strict=True))
        return [answers[place] for place in range(len(prompts))]

    def _answer_with(
        self,
        candidates: int,
        prompts: Sequence[ModelPrompt],
        max_tokens: int,
        progress: StageProgress,
    ) -> list[Answer]:
        from midfill.frontend.sampling import SamplingParams

        judged = any(prompt.judged for prompt in prompts)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            min_confidence=0.0 if judged else None,
            candidates=candidates,
        )
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
                _evidence(result.answers[0].confidence),
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
            judged = {"min_confidence": 0} if prompt.judged else {}
            tried = {"candidates": prompt.candidates} if prompt.candidates > 1 else {}
            asked = {"prompt": prompt.text.prefix, "suffix": prompt.text.suffix}
            return {**body, **asked, "midfill": {**window, **method, **judged, **tried}}
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
            body = response.json()
            choice = body["choices"][0]
            estimate = (body.get("midfill") or {}).get("confidence")
            return Answer(
                choice["text"] or "",
                choice["finish_reason"] == "stop",
                confidence=None if estimate is None else AnswerEvidence(float(estimate)),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise MidfillError(f"{self._base_url} sent no completion: {error!r}") from None


def _evidence(confidence: "Confidence | None") -> AnswerEvidence | None:
    if confidence is None:
        return None
    return AnswerEvidence(confidence.estimate, confidence.start, confidence.line)


def _text_format(sentinels: tuple[str, str, str]) -> FimFormat:
    """Return a format for laying out prompts as text; its token ids are not used."""
    prefix, suffix, middle = (Sentinel(text, -1) for text in sentinels)
    return FimFormat("custom", prefix, suffix, middle)


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model, and how to run it; the fields but ``processes`` are those of ``LLM``.

    Attributes:
        processes: copies of the model, each in a process of its own and with its share of the
            threads. The threads of one copy wait for each other many times per step, so where other
            programs keep the machine busy, several copies are faster.
    """

    model: str = DEFAULT_MODEL
    adapter: str | None = None
    weights: WeightsOption = "auto"
    kv_cache_dtype: KVCacheDtypeName = "auto"
    backend: Backend = "auto"
    device: str | None = None
    threads: int | None = None
    fim_tokens: tuple[str, str, str] | None = None
    processes: int = 1

    def fingerprint(self) -> str:
        """Return ``Model.fingerprint`` without loading the model.

        Raises:
            MidfillError: the model or its adapter can't be opened.
        """
        folder = resolve_adapter(self.model, self.adapter)
        return fingerprint_of(open_model(resolve(self.model), folder, self.weights))

    @contextmanager
    def load_copy(
        self, kv_memory: int | None = None, progress: Progress = ignore_progress
    ) -> Iterator[LocalModel]:
        """Load the model into this process alone; its threads end with the block.

        Args:
            kv_memory: bytes for KV; None sizes it from free memory.
            progress: called with (stage, done, total).

        Raises:
            MidfillError: the model can't be found or loaded.
        """
        from midfill.llm import LLM  # slow to import

        options = asdict(self)
        del options["processes"]
        with LLM(**options, kv_memory=kv_memory, progress=progress) as llm:
            kv = "" if self.kv_cache_dtype == "auto" else f", KV {self.kv_cache_dtype}"
            yield LocalModel(llm, f"{self.model} (weights {self.weights}{kv})")


_KV_BYTES = 1 << 30  # of each copy: they can't all size it from the free memory
_END_SECONDS = 10.0


@contextmanager
def load_model(choice: ModelChoice, progress: Progress = ignore_progress) -> Iterator[Model]:
    """Load a model; its processes and threads end with the block.

    Raises:
        MidfillError: the model can't be found or loaded.
    """
    if choice.processes == 1:
        with choice.load_copy(progress=progress) as model:
            yield model
        return
    threads = (choice.threads or available_threads()) // choice.processes
    share = replace(choice, threads=max(1, threads), processes=1)
    # This process loads first, so that the others find packed weights.
    with (
        share.load_copy(_KV_BYTES, progress) as first,
        ModelPool(first, share, choice.processes) as pool,
    ):
        yield pool


class ModelPool:
    """Copies of a model that share the work; a context manager, and a ``Model``.

    Prompts of a group go to the same copy, whose prefix cache knows what they have in common.

    Args:
        first: the copy in this process.
        choice: what the other processes load.
        processes: number of copies, ``first`` included.
    """

    remote = False

    def __init__(self, first: LocalModel, choice: ModelChoice, processes: int) -> None:
        self._first = first
        self.format = first.format
        self.description = first.description
        self.fingerprint = first.fingerprint
        self.keeps_tokens = first.keeps_tokens
        spawn = multiprocessing.get_context("spawn")  # a fork would share the engine's threads
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(1, processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(choice, theirs), daemon=True)
            with libraries_start_python():
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()

    def answer(
        self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
    ) -> list[Answer]:
        """See ``Model``."""
        shares = split_by_group(prompts, len(self._connections) + 1)
        for connection, share in zip(self._connections, shares[1:], strict=True):
            try:
                connection.send(([prompts[place] for place in share], max_tokens))
            except OSError:
                raise MidfillError(str(_receive(connection))) from None
        answers: dict[int, Answer] = {}
        counts = [0] * len(shares)

        def count(copy: int, done: int) -> None:
            counts[copy] = done
            progress(sum(counts), len(prompts))

        def count_own(done: int, _: int) -> None:
            count(0, done)

        own = [prompts[place] for place in shares[0]]
        answers |= zip(shares[0], self._first.answer(own, max_tokens, count_own), strict=True)
        waiting = {connection: copy for copy, connection in enumerate(self._connections, 1)}
        while waiting:
            for ready in wait(list(waiting)):
                assert isinstance(ready, Connection)
                copy = waiting[ready]
                match _receive(ready):
                    case int(done):
                        count(copy, done)
                    case list(found):
                        answers |= zip(shares[copy], found, strict=True)
                        del waiting[ready]
                    case message:
                        raise MidfillError(str(message))
        return [answers[place] for place in range(len(prompts))]

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """See ``Model``; the first copy counts, since one request finds what the last one left."""
        return self._first.count_computed(requests)


def split_by_group(prompts: Sequence[ModelPrompt], shares: int) -> list[list[int]]:
    """Return the places of the prompts in each share: similar numbers, groups undivided."""
    groups: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(place)
    split: list[list[int]] = [[] for _ in range(shares)]
    for places in sorted(groups.values(), key=len, reverse=True):
        min(split, key=len).extend(places)
    return [sorted(share) for share in split]


def _receive(connection: Connection) -> object:
    """Return what a copy sent: a number of answers so far, all its answers, or an error's text."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return "a process with a copy of the model ended; is there too little memory?"


def _serve(choice: ModelChoice, connection: Connection) -> None:
    """Load a copy and answer prompts until the other end is closed."""
    try:
        with choice.load_copy(_KV_BYTES) as model:
            while True:
                prompts, max_tokens = connection.recv()
                connection.send(_answer(model, prompts, max_tokens, connection))
    except (EOFError, OSError, KeyboardInterrupt):
        return
    except MidfillError as error:  # the model can't be loaded
        connection.send(str(error))


def _answer(
    model: LocalModel, prompts: Sequence[ModelPrompt], max_tokens: int, connection: Connection
) -> list[Answer] | str:
    """Return the answers, or why there are none."""
    try:
        return model.answer(prompts, max_tokens, lambda done, _: connection.send(done))
    except MidfillError as error:
        return str(error)
