"""LLM: a model in the calling process, for Python programs. No server, no second process."""

import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

import msgspec

from midfill.config import Backend, KVCacheDtypeName, ModelOptions, WeightsOption
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats
from midfill.frontend.answer import Answer, AnswerDelta
from midfill.frontend.generation import (
    AnswerStream,
    GenerationResult,
    PromptGeneration,
    answered,
    whole_answers,
)
from midfill.frontend.prompt import Prompt, with_token_stops
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format, fingerprint_of
from midfill.frontend.sampling import SamplingParams, check_sampling
from midfill.infill.context_files import ContextFile
from midfill.infill.layout import PromptLayout
from midfill.infill.request import InfillRequest, RequestedLayout, WindowMode
from midfill.infill.window import WindowRule
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.system.progress import Progress, StageProgress

DEFAULT_SAMPLING = SamplingParams(temperature=0.0, max_tokens=128)


class InfillOptions(TypedDict, total=False):
    """Options of ``LLM.infill``, see ``InfillRequest``; ``context`` is its ``context_files``."""

    layout: RequestedLayout
    document: str | None
    window: WindowMode | WindowRule
    context: Sequence[ContextFile]
    context_characters: int | None
    open_line: bool | None
    path: str
    repository: str


class LoadOptions(TypedDict, total=False):
    """Options of ``LLM``; each has the default of the field of ``ModelOptions``.

    Attributes:
        backend: what runs the model: "cpu", "torch", or "auto".
        device: of the torch backend, such as "cuda:1".
        weights: how the CPU kernels store weights: "auto" (as in the file), "f32", or rounded to
            "q4" or "q8" where they have more bits.
        latent_parts: processes that keep a part of each latent, of models that have latents, in
            PyTorch; answers are approximate then. None: one keeps all.
        threads: of the CPU; None takes all cores this process may use.
        context: maximum tokens of a prompt and its answer; None takes the model's.
        kv_memory: bytes for KV; None is sized from free memory.
        kv_cache_dtype: how the CPU kernels store KV: "auto", "f32", "f16", "bf16", "i8", "i4".
        speculation: draft tokens that copy from the text; never changes an answer.
        method: compresses the KV of every prompt, as in "cake:budget=256", or takes it from
            elsewhere, as in "cacheblend"; see ``midfill methods``.
        scheduler: what a step runs and who is admitted next, as in "shortest-first:ageing=20".
        sentence_encoder: folder of a model such as all-MiniLM-L6-v2, for methods that find topics.
    """

    backend: Backend
    device: str | None
    weights: WeightsOption
    latent_parts: int | None
    threads: int | None
    context: int | None
    kv_memory: int | None
    kv_cache_dtype: KVCacheDtypeName
    speculation: bool
    method: str
    scheduler: str
    sentence_encoder: str | None


class InProcessEngine:
    """An engine that any number of threads may call. No thread is dedicated to running it.

    A thread that waits for an answer runs the next step. The step may also produce outputs for
    other threads, which find them in their requests' mailboxes.

    Args:
        engine: must not be used by anything else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._mailboxes: dict[str, deque[EngineOutput]] = {}
        self._lock = threading.Lock()

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        with self._lock:
            return self._engine.stats()

    def answer(
        self, responses: Sequence[PromptGeneration], sampling: SamplingParams
    ) -> Generator[tuple[int, AnswerDelta], None, None]:
        """Generate answers; yield (index in ``responses``, delta) until all are complete.

        The requests are queued at the first ``next``, and end when the generator is closed.

        Raises:
            InvalidRequestError: a prompt can never run.
            GenerationError: the engine failed on one.
        """
        requests = [
            response.prompt.request(f"{next(self._numbers)}", sampling) for response in responses
        ]
        places = {request.request_id: place for place, request in enumerate(requests)}
        try:
            for request in requests:
                self._add(request)
            while not all(response.finished for response in responses):
                for output in self._next_outputs(places):
                    place = places[output.request_id]
                    delta = responses[place].push(output)
                    if delta is not None:
                        yield place, delta
                        if delta.finish_reason is not None and output.finish_reason is None:
                            self._end(output.request_id, output.index)
                    follow_up = responses[place].follow_up(requests[place])
                    for request in follow_up.requests:
                        places[request.request_id] = place
                        self._add(request)
                    for request_id in follow_up.ended:
                        self._drop(request_id)
                    if responses[place].finished:
                        self._drop(output.request_id)
        finally:
            for request_id in places:
                self._drop(request_id)

    def _add(self, request: EngineRequest) -> None:
        with self._lock:
            self._engine.add(request)
            self._mailboxes[request.request_id] = deque()

    def _end(self, request_id: str, index: int) -> None:
        """End an answer in which a stop string was found: the engine doesn't know of those."""
        with self._lock:
            self._engine.cancel(request_id, index)

    def _drop(self, request_id: str) -> None:
        """End a request, whether or not it is complete."""
        with self._lock:
            if self._mailboxes.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def _next_outputs(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Return outputs of these requests; run a step if there are none yet."""
        with self._lock:
            outputs = self._collect(request_ids)
            if not outputs:
                for output in self._engine.step():
                    mailbox = self._mailboxes.get(output.request_id)
                    if mailbox is not None:
                        mailbox.append(output)
                outputs = self._collect(request_ids)
            return outputs

    def _collect(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Empty the mailboxes of these requests."""
        outputs: list[EngineOutput] = []
        for request_id in request_ids:
            mailbox = self._mailboxes.get(request_id)
            if mailbox:
                outputs += mailbox
                mailbox.clear()
        return outputs


__all__ = ["LLM", "Answer", "AnswerStream", "GenerationResult", "SamplingParams"]


class LLM:
    """A loaded model. Its prefix cache lives as long as the object, so edits of a text cost little.

    It computes only while it is called: there is no prefill in idle time as in the server. It is
    thread-safe: threads that wait for answers take turns in running the engine's steps.

    Attributes:
        fim_format: the model's FIM tokens and their order; None if it has none, in which case
            ``infill`` shows it the prefix alone.
        tokenizer: the model's tokenizer.
        info: the backend, memory, load time, and ``info.context``, the maximum number of tokens of
            a prompt and its answer.
        fingerprint: hex digest of what decides its answers: weights, adapter and rules of layout.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        adapter: str | Path | None = None,
        fim_tokens: tuple[str, str, str] | None = None,
        window: WindowRule | None = None,
        progress: Progress | None = None,
        kv_dtype: KVCacheDtypeName | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Load a model; fetch it first if it is not stored yet.

        Args:
            model: a path, ORG/NAME on the Hugging Face hub, or a name ``midfill models`` lists.
            adapter: folder of a LoRA adapter to merge into the model, or "none". None takes the
                adapter that midfill ships for a model of this name, if there is one.
            fim_tokens: the prefix, suffix and middle token, for models that midfill doesn't know.
            window: how much of a long document to show the model around the caret; None takes what
                the model or its adapter says.
            progress: called with (stage, done, total).
            kv_dtype: the former name of ``kv_cache_dtype``, for one release.
            options: see ``LoadOptions``.

        Raises:
            MidfillError: the model can't be found or loaded.
        """
        if kv_dtype is not None:
            message = "LLM(kv_dtype=...) is now LLM(kv_cache_dtype=...)"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            options["kv_cache_dtype"] = kv_dtype
        folder = resolve_adapter(model, None if adapter is None else str(adapter))
        loaded = ModelOptions(
            adapter=None if folder is None else str(folder),
            allow_methods=("any",),
            **options,
        )
        started = time.perf_counter()
        checkpoint = open_model(resolve(model, progress), folder, loaded.weights)
        self.fim_format = fim_format(checkpoint, fim_tokens)
        self.tokenizer = checkpoint.tokenizer
        self.fingerprint = fingerprint_of(checkpoint)
        engine, self._runner, self.info = load_engine(checkpoint, loaded, progress, started)
        self._engine = InProcessEngine(engine)
        self._prompts = PromptEncoder(checkpoint, self.fim_format, self.info.context, window)
        self._encoding = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the model's threads. Its memory is freed with the object."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    @property
    def window(self) -> WindowRule:
        """How much of a long document the model is shown around the caret."""
        return self._prompts.window

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are below it."""
        return self.tokenizer.vocab_size

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        return self._engine.stats

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        method: str | None = None,
    ) -> list[GenerationResult]:
        """Continue each prompt, all in one batch.

        Args:
            prompts: a text, texts, or lists of token ids. Special tokens in texts are parsed.
            sampling: how to generate; greedy, at most 128 tokens, if None.
            method: compresses the prompts' KV, as in "cake:budget=256", see ``methods.registry``;
                "none" keeps all of it, None takes the model's ``method``.

        Returns:
            One result per prompt, in order.

        Raises:
            InvalidRequestError: a prompt or a parameter that can't be used.
        """
        items = [prompts] if isinstance(prompts, str) else prompts
        encoded = [self._prompt(item).with_method(method) for item in items]
        return self._results(encoded, self._checked(sampling))

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        method: str | None = None,
    ) -> AnswerStream:
        """``generate`` for one prompt, piece by piece; closing the stream ends the request."""
        return self._stream(self._prompt(prompt).with_method(method), self._checked(sampling))

    def infill(
        self,
        prefix: str,
        suffix: str,
        sampling: SamplingParams | None = None,
        *,
        healing: bool = True,
        empty_threshold: float | None = None,
        candidates: int | None = None,
        method: str | None = None,
        **options: Unpack[InfillOptions],
    ) -> GenerationResult:
        """Fill in between two texts; special tokens in them stay text.

        Args:
            prefix: the text before the caret.
            suffix: the text after it.
            sampling: how to generate; greedy, at most 128 tokens, if None.
            healing: let the model write an unfinished last word again instead of continuing right
                at the caret. The answer's text is what comes after the caret either way.
            empty_threshold: the answer is empty where the probability of an empty answer is above
                this, and has text elsewhere; 0 leaves it to each token. None takes what the model
                says.
            candidates: see ``SamplingParams``; None takes what ``sampling`` says.
            method: see ``generate``.
            options: see ``InfillOptions``.

        Raises:
            InvalidRequestError: a text or a parameter that can't be used.
        """
        sampling = sampling or DEFAULT_SAMPLING
        if candidates is not None:
            sampling = msgspec.structs.replace(sampling, candidates=candidates)
        sampling = self._checked(sampling)
        request = _infill_request(prefix, suffix, options)
        prompt = self._infill_prompt(request, healing, empty_threshold, sampling)
        return self._results([prompt.with_method(method)], sampling)[0]

    def infill_stream(
        self,
        prefix: str,
        suffix: str,
        sampling: SamplingParams | None = None,
        *,
        healing: bool = True,
        empty_threshold: float | None = None,
        method: str | None = None,
        **options: Unpack[InfillOptions],
    ) -> AnswerStream:
        """``infill``, piece by piece; closing the stream ends the request."""
        sampling = self._checked(sampling)
        request = _infill_request(prefix, suffix, options)
        prompt = self._infill_prompt(request, healing, empty_threshold, sampling)
        return self._stream(prompt.with_method(method), sampling)

    def infill_all(
        self,
        items: Sequence[InfillRequest | PromptLayout],
        sampling: SamplingParams | None = None,
        *,
        healing: bool | Sequence[bool] = True,
        empty_threshold: float | Sequence[float | None] | None = None,
        method: str | Sequence[str | None] | None = None,
        progress: StageProgress | None = None,
    ) -> list[GenerationResult]:
        """Fill in many holes, all in one batch.

        Args:
            items: requests for the planner, or layouts to use as they are.
            sampling: how to generate; greedy, at most 128 tokens, if None.
            healing: see ``infill``; for all items or for each.
            empty_threshold: the same.
            method: the same.
            progress: called with (number of answered items, number of items).

        Returns:
            One result per item, in order.

        Raises:
            InvalidRequestError: an item or a parameter that can't be used.
        """
        sampling = self._checked(sampling)
        healed = [healing] * len(items) if isinstance(healing, bool) else healing
        given = empty_threshold
        thresholds = given if isinstance(given, Sequence) else [given] * len(items)
        methods = [method] * len(items) if method is None or isinstance(method, str) else method
        prompts = [
            self._infill_prompt(item, heals, threshold, sampling).with_method(each)
            for item, heals, threshold, each in zip(items, healed, thresholds, methods, strict=True)
        ]
        return self._results(prompts, sampling, progress)

    def _prompt(self, prompt: str | Sequence[int]) -> Prompt:
        with self._encoding:
            if isinstance(prompt, str):
                return self._prompts.raw(prompt)
            return self._prompts.tokens(prompt)

    def _infill_prompt(
        self,
        item: InfillRequest | PromptLayout,
        healing: bool,
        empty_threshold: float | None,
        sampling: SamplingParams,
    ) -> Prompt:
        stops = sampling.stop_token_ids
        with self._encoding:
            if isinstance(item, PromptLayout):
                prompt = self._prompts.encode_layout(item, healing=healing, stop_token_ids=stops)
            else:
                prompt = self._prompts.infill(item, healing=healing, stop_token_ids=stops)
        return prompt.with_empty_threshold(empty_threshold)

    def _checked(self, sampling: SamplingParams | None) -> SamplingParams:
        sampling = sampling or DEFAULT_SAMPLING
        check_sampling(sampling, self.tokenizer.vocab_size)
        return sampling

    def _results(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        progress: StageProgress | None = None,
    ) -> list[GenerationResult]:
        sampling = with_token_stops(sampling, prompts, self.tokenizer)
        responses = [PromptGeneration(prompt, sampling, self.tokenizer) for prompt in prompts]
        deltas: list[list[AnswerDelta]] = [[] for _ in prompts]
        finished = 0
        for place, delta in self._answers(responses, sampling):
            deltas[place].append(delta)
            if responses[place].finished:
                finished += 1
                if progress is not None:
                    progress(finished, len(prompts))
        return [whole_answers(*each) for each in zip(responses, deltas, strict=True)]

    def _stream(self, prompt: Prompt, sampling: SamplingParams) -> AnswerStream:
        sampling = with_token_stops(sampling, [prompt], self.tokenizer)
        sampling = msgspec.structs.replace(sampling, candidates=1)
        response = PromptGeneration(prompt, sampling, self.tokenizer, streamed=True)
        return AnswerStream(response, self._answers([response], sampling))

    def _answers(
        self, responses: Sequence[PromptGeneration], sampling: SamplingParams
    ) -> Generator[tuple[int, AnswerDelta], None, None]:
        """Generate answers, see ``InProcessEngine.answer``, and record them in their documents."""
        try:
            yield from self._engine.answer(responses, sampling)
        finally:
            # A stream that nobody closed ends whenever it is collected, even amid an encoding on
            # this very thread. An answer that isn't recorded is only not drafted later.
            if self._encoding.acquire(blocking=False):
                try:
                    self._prompts.record_answers(map(answered, responses))
                finally:
                    self._encoding.release()


def _infill_request(prefix: str, suffix: str, options: InfillOptions) -> InfillRequest:
    return InfillRequest(
        prefix=prefix,
        suffix=suffix,
        layout=options.get("layout", "auto"),
        document=options.get("document"),
        window=options.get("window", "stable"),
        context_files=tuple(options.get("context", ())),
        context_characters=options.get("context_characters"),
        open_line=options.get("open_line"),
        path=options.get("path", ""),
        repository=options.get("repository", ""),
    )
