"""ModelService: one served model, which every dialect calls.

The way of a request:

1. A dialect reads and checks its body, and makes SamplingParams and a PromptSource per prompt of
   it.
2. It calls ``encode``: the prompts are planned and tokenised, on the encoding thread where that may
   take long.
3. It calls ``generate``: a Generation holds one EngineRequest and one PromptGeneration per prompt.
4. It iterates over ``Generation.deltas``: the requests go to the engine process through
   ``ServedEngine.submit``, tokens come back, and the PromptGenerations turn them into text.
5. It sends the deltas in its own format, as a stream or as one body.
6. Once all answers are complete, IdlePrefill has the engine compute what the documents of the
   prompts will probably need next, as soon as the engine is idle.

A client that disconnects cancels all this wherever it is (``middleware``); a newer request of the
same document may, too (``request.Superseding``).
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

import msgspec

from midfill.engine.scheduling.admission import NEW_DOCUMENT
from midfill.errors import DeadlineError, QueueFullError, StoppingError
from midfill.frontend.generation import PromptGeneration, answered
from midfill.frontend.prompt import Prompt, PromptSource, with_token_stops
from midfill.frontend.prompt_encoder import Admit, PromptEncoder
from midfill.frontend.sampling import SamplingParams
from midfill.frontend.token_report import TokenReport
from midfill.infill.confidence import ConfidenceRule
from midfill.infill.formats import FimFormat
from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.metrics import Metrics, MetricsOfModels, memory_metrics
from midfill.serving.server.metrics_history import MetricsHistory
from midfill.serving.server.request import (
    Generation,
    GenerationRequest,
    RequestRecord,
    Superseding,
    current_request,
)
from midfill.serving.server.responses import ApiError
from midfill.serving.server.served_engine import ServedEngine, refuse_methods

_log = logging.getLogger(__name__)
_MAX_QUOTED = 200  # characters of a name that there isn't
P = ParamSpec("P")
T = TypeVar("T")


class EncodingThread:
    """Where a PromptEncoder is called: it remembers documents, and so is not thread-safe.

    Calls run one at a time on a thread of its own, since a long text would block the event loop's.

    Args:
        encoder: the encoder.
        inline_bytes: see ``encodes_at_once`` of ``ModelService``.
    """

    def __init__(self, encoder: PromptEncoder, inline_bytes: int) -> None:
        self._encoder = encoder
        self._inline_bytes = inline_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt encoding")
        self._lock = threading.Lock()

    async def run(
        self,
        function: Callable[Concatenate[PromptEncoder, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``function(encoder, *args)`` on the thread, or here if the request is small.

        Raises:
            DeadlineError: the current request's client doesn't wait so long.
        """
        started, record = time.perf_counter(), current_request.get()
        deadline = None if record is None else record.deadline()
        size = None if record is None else record.body_bytes

        def call() -> T:
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineError(
                    "no time is left of what the request gives; try again in a moment",
                    retry_after=1,
                )
            return function(self._encoder, *args, **kwargs)

        def call_apart() -> T:
            with self._lock:
                return call()

        try:
            is_small = size is not None and size <= self._inline_bytes
            if is_small and self._lock.acquire(blocking=False):
                try:
                    return call()
                finally:
                    self._lock.release()
            return await asyncio.get_running_loop().run_in_executor(self._thread, call_apart)
        finally:
            if record is not None:
                record.encodings.append((started, time.perf_counter()))

    def start(self, function: Callable[[PromptEncoder, T], None], what: T) -> None:
        """Call ``function(encoder, what)`` on the thread; nobody waits for it."""

        def call() -> None:
            with self._lock:
                try:
                    function(self._encoder, what)
                except Exception:
                    _log.exception("what was answered couldn't be recorded")

        with contextlib.suppress(RuntimeError):  # the thread has ended: the server is stopping
            self._thread.submit(call)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


class IdlePrefill:
    """Computes the prompts that documents will probably need next, while it costs nothing.

    A prefill is a background request: it waits until the engine is idle, any other request
    interrupts it within one step, and it changes nothing but how long the next answer takes. There
    is at most one per document, and per tenant that asks: a new one replaces the last.

    Args:
        engine: computes the prompts.
        encoding: knows what documents probably need next.
    """

    def __init__(self, engine: ServedEngine, encoding: EncodingThread) -> None:
        self._engine = engine
        self._encoding = encoding
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by document, or by tenant

    def start(self, document: str | None, tenant: str, inexact: Prompt | None = None) -> None:
        """Start to prefill what a document will probably need next.

        Args:
            document: ``LayoutReport.document``.
            tenant: whose prefix cache to use.
            inexact: its last prompt, if its KV was taken from elsewhere: it is computed first.
        """
        key = f"tenant-{tenant}" if document is None else document
        self._start(key, lambda: self._prefill_document(document, tenant, inexact))

    def start_context(self, request: InfillRequest) -> None:
        """Start to prefill what a client will probably need next with the request's context."""
        tenant, find = request.tenant, PromptEncoder.expected_with_snippets
        self._start(f"tenant-{tenant}", lambda: self._prefill(find, request, tenant))

    def start_prompt(self, prompt: Prompt, tenant: str) -> None:
        """Start to prefill a prompt for which a client will ask soon."""
        self._start(f"tenant-{tenant}", lambda: self._compute(prompt, tenant))

    async def finish(self) -> None:
        """Wait until all prefills that have been started are done."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def close(self) -> None:
        """Cancel all prefills."""
        for key in list(self._tasks):
            self._cancel(key)

    def _start(self, key: str, work: Callable[[], Awaitable[object]]) -> None:
        self._cancel(key)
        # In a context of its own: it is no part of the request that caused it.
        task = asyncio.create_task(
            _log_errors(work), name="idle prefill", context=contextvars.Context()
        )
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._forget(key, task))

    async def _prefill_document(
        self, document: str | None, tenant: str, inexact: Prompt | None
    ) -> None:
        if inexact is not None:
            await self._compute(inexact, tenant)
        if document is not None:
            await self._prefill(PromptEncoder.expected_prompt, document, tenant)

    async def _prefill(
        self, find: Callable[[PromptEncoder, T], Prompt | None], what: T, tenant: str
    ) -> None:
        expected = await self._encoding.run(find, what)
        if expected is not None and await self._compute(expected, tenant):
            await self._encoding.run(PromptEncoder.record_computed, expected)

    async def _compute(self, prompt: Prompt, tenant: str) -> bool:
        """Have a prompt computed where its document's KV is; return whether it was."""
        with self._engine.submit(prompt.background_request(tenant)) as outputs:
            return "stop" in {output.finish_reason async for output in outputs}

    def _cancel(self, key: str) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def _forget(self, key: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]


async def _log_errors(work: Callable[[], Awaitable[object]]) -> None:
    """Do the work. No client waits for it, so errors are not reported to one."""
    try:
        await work()
    except Exception as error:
        _log.debug("idle prefill failed: %s", error)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that clients may ask for.

    Attributes:
        name: the name.
        created: when its model was loaded, or else when the server was started; seconds since 1970.
        bytes: of its weights, or what it takes in memory where that isn't loaded.
        service: its model's; None if it isn't in memory.
    """

    name: str
    created: int
    bytes: int
    service: "ModelService | None"


class Monitored(Protocol):
    """What a server serves, as its monitoring and its end see it: a model, or several."""

    @property
    def metrics(self) -> Metrics | MetricsOfModels:
        """What is counted."""

    @property
    def history(self) -> MetricsHistory:
        """What it was in the last half hour."""

    def stop(self) -> None:
        """End all requests in progress, and refuse new ones."""


class ModelService:
    """One model behind all dialects.

    Attributes:
        name: what clients call the model.
        aliases: further names that they may call it.
        created: when it was loaded, in seconds since 1970.
        engine: the engine that runs it.
        tokenizer: the model's tokenizer.
        metrics: the server's metrics.
        history: what they were in the last half hour.
        max_body_bytes: maximum size of a request body.
        check_method: raises InvalidRequestError for a method that requests may not choose.
        limits: what tenants may use.
        min_confidence: how sure answers must be that editors get; None gives them all.
        candidates: how many answers are tried for editors; None where none can be tried at all.
        listed: returns what clients may ask this server for: this model by its names, and others
            where there are several.
    """

    def __init__(
        self,
        name: str,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        max_body_bytes: int,
        *,
        aliases: Sequence[str] = (),
        check_method: Callable[[str], None] = refuse_methods,
        infilling_method: str | None = None,
        idle_prefill: bool = True,
        stream_interval: float = 0.0,
        tenants: Sequence[str] = ("",),
        context: int | None = None,
        limits: RateLimits | None = None,
        completion_timeout: float = 0.0,
        min_confidence: float | None = None,
        candidates: int | None = None,
        encodes_at_once: int = 0,
    ) -> None:
        """Serve ``engine``.

        Args:
            name, engine, tokenizer, max_body_bytes, aliases, check_method, limits, candidates: see
                the attributes.
            prompts: the encoder of the model's prompts.
            infilling_method: method of infilling requests that name none and that somebody waits
                for; None leaves it to the engine.
            idle_prefill: compute expected prompts while the engine is idle, also where no client
                asks for it.
            stream_interval: seconds for which tokens of a streamed answer may be held back.
            tenants: everybody who may send requests.
            completion_timeout: seconds after which nobody waits any more for an infill request
                whose client doesn't say how long it waits; 0 is for ever.
            min_confidence: how sure answers must be that editors get; None takes what was chosen
                for the model, and 0 gives them all answers as the model wrote them.
            context: see the attribute; None where the encoder counts the model's own tokens.
            encodes_at_once: requests with bodies of up to so many bytes are encoded on the event
                loop's thread: where encoding is fast, handing it over takes longer.
        """
        self.name = name
        self.aliases = tuple(alias for alias in dict.fromkeys(aliases) if alias != name)
        self.created = int(time.time())
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_body_bytes = max_body_bytes
        self.check_method = check_method
        self._infilling_method = infilling_method
        self.limits = limits or RateLimits()
        self.metrics = Metrics(name, engine, tenants)
        self.history = MetricsHistory(self.metrics.sums)
        self.metrics.add(partial(memory_metrics, prompts.memory))
        self._prompts = prompts
        self._context = prompts.context if context is None else context
        self._encoding = EncodingThread(prompts, encodes_at_once)
        self._apart = ThreadPoolExecutor(1, thread_name_prefix="apart")
        self._idle_prefill = IdlePrefill(engine, self._encoding)
        self._prefills_unasked = idle_prefill
        self._stream_interval = stream_interval
        self._superseding = Superseding()
        self._generations: WeakSet[Generation] = WeakSet()
        self._stopping = False
        self._completion_timeout = completion_timeout or None
        self.min_confidence = _least_confidence(prompts.confidence_rule, min_confidence)
        self.candidates = candidates
        self._suggestions = min_confidence != 0
        self.listed = self._list_names

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""
        return self._context

    @property
    def fim_format(self) -> FimFormat | None:
        """The model's FIM tokens and their order; None if it has none that are known."""
        return self._prompts.format

    @property
    def window(self) -> WindowRule:
        """How much of a long document to show the model where a request doesn't say it."""
        return self._prompts.window

    @property
    def raw_bos(self) -> int | None:
        """The token that raw prompts begin with; None if there is none."""
        return self._prompts.raw_bos

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._prompts.has_chat_template

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is told from the content of chats' answers."""
        format = self._prompts.answer_format
        return format is not None and format.has_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether calls of functions are told from the content of chats' answers."""
        format = self._prompts.answer_format
        return format is not None and format.has_calls

    @property
    def template_names(self) -> frozenset[str]:
        """Names that the model's chat template reads, such as ``tools``."""
        return self._prompts.template_names

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return (self.name, *self.aliases)

    def check_model(self, model: str | None) -> str:
        """Return the name to answer with: the client's own, or the model's if it gave none.

        Raises:
            ApiError: 404 for any other model's name.
        """
        if not model:  # some editors send "" where their user has chosen none
            return self.name
        if model not in self.names:
            raise self.unknown_model(model)
        return model

    def unknown_model(self, model: str) -> ApiError:
        """Return the error for a name that there isn't."""
        known = ", ".join(repr(each.name) for each in self.listed())
        return ApiError(
            404, f"there is no model {model[:_MAX_QUOTED]!r}; this server has {known}",
            param="model", code="model_not_found",
        )  # fmt: skip

    def _list_names(self) -> list[ListedModel]:
        info = self.engine.info
        size = 0 if info is None else info.weight_bytes
        return [ListedModel(name, self.created, size, self) for name in self.names]

    def check_queue(self) -> None:
        """Refuse the current request where it may not be queued, whatever it asks.

        Raises:
            QueueFullError: too much is queued.
            InvalidRequestError: its headers give it no time that makes sense.
        """
        if (record := current_request.get()) is not None:
            self._queue_check(record)("")

    async def encode(self, sources: Sequence[PromptSource]) -> list[Prompt]:
        """Encode the prompts of a request, unless too many are queued to take them.

        Only where a document's first request would be refused is each request's document looked
        for before its prompt is encoded.

        Raises:
            QueueFullError: too much is queued.
            InvalidRequestError: a prompt can't be encoded.
        """
        record, admit = current_request.get(), None
        if record is not None:
            check = self._queue_check(record)
            try:
                check(NEW_DOCUMENT)
            except QueueFullError:
                admit = check
        return await self._encoding.run(PromptEncoder.encode_all, sources, admit)

    async def report_tokens(
        self, prompts: Sequence[Prompt], tenant: str
    ) -> list[TokenReport | None]:
        """Return the tokens of each prompt, see ``PromptEncoder.report_tokens``."""
        return await self._encoding.run(PromptEncoder.report_all, prompts, tenant)

    async def call_apart(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what may take long on a thread that no prompt waits for, one call after the other.

        The function must not stay in one call of C code for long: that would stop all threads.
        """
        work = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._apart, work)

    def _queue_check(self, record: RequestRecord) -> Admit:
        """Return what refuses a request's document where it may not be queued now."""
        tenant, deadline = record.tenant or "", record.deadline()

        def check(document: str | None) -> None:
            known = NEW_DOCUMENT if document is None else document
            self.engine.check_admission(tenant, deadline, known)

        return check

    def generate(self, request: GenerationRequest) -> Generation:
        """Prepare the generation of answers; iterating over its deltas starts it.

        Raises:
            StoppingError: the server is about to end.
        """
        if self._stopping:
            raise _stopping()
        record, tenant, sampling = current_request.get(), request.tenant, request.sampling
        if request.streamed:
            sampling = msgspec.structs.replace(sampling, candidates=1)
        prompts = self._with_method(request)
        infilling = any(prompt.infilling for prompt in prompts)
        default_timeout = self._completion_timeout if infilling else None
        generation = Generation(
            self.engine,
            self.metrics.of_tenant(tenant),
            self.tokenizer,
            prompts,
            with_token_stops(sampling, prompts, self.tokenizer),
            tenant=tenant,
            limits=self.limits,
            stream_interval=self._stream_interval if request.streamed else math.inf,
            # Must not hold the generation: with a cycle, its texts stay until garbage is collected.
            on_complete=lambda generations: self._prefill_next(generations, tenant),
            on_end=partial(_record_answers, self._encoding),
            request_id="" if record is None else record.request_id,
            arrived=None if record is None else record.arrived,
            deadline=None if record is None else record.deadline(default_timeout),
            streamed=request.streamed,
            hints=request.hints,
        )
        self._generations.add(generation)
        if record is not None:
            record.model, record.generation = self.name, generation
        if request.supersedes is not None:
            self._superseding.enter(generation, tenant, request.supersedes)
        return generation

    def _with_method(self, request: GenerationRequest) -> Sequence[Prompt]:
        """Return a request's prompts with the method of infilling requests that name none."""
        method = self._infilling_method
        if method is None or request.hints.offline:
            return request.prompts
        return [
            prompt.with_method(method) if prompt.infilling and prompt.method is None else prompt
            for prompt in request.prompts
        ]

    def for_editor(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters of an editor's request: only what is worth showing is answered."""
        ends = dataclasses.replace(sampling.post_processing, suggestion=self._suggestions)
        return msgspec.structs.replace(
            sampling,
            post_processing=ends,
            min_confidence=self.min_confidence,
            candidates=self.candidates or 1,
        )

    def prefill(self, prompt: Prompt, tenant: str) -> None:
        """Have a prompt computed while the engine is idle, for a request that will come soon."""
        self._idle_prefill.start_prompt(prompt, tenant)

    def prefill_context(self, request: InfillRequest) -> None:
        """Prepare for requests with the context that a client announces, while the engine is idle.

        What is computed is the last document with this context, or the context alone.
        """
        self._idle_prefill.start_context(request)

    async def finish_prefills(self) -> None:
        """Wait until the engine has computed what it was asked for in idle time."""
        await self._idle_prefill.finish()

    def stop(self) -> None:
        """End all requests in progress, and refuse new ones, with an error that says so."""
        self._stopping = True
        for generation in tuple(self._generations):
            generation.fail(_stopping())

    def close(self) -> None:
        """End idle prefills and the threads."""
        self._idle_prefill.close()
        self._encoding.close()
        self._apart.shutdown(cancel_futures=True)

    def _prefill_next(self, generations: Sequence[PromptGeneration], tenant: str) -> None:
        """Prepare for the next request of each prompt's document."""
        for response in generations:
            document = response.prompt.document or None
            inexact = response.prompt if response.usage.reused_tokens else None
            if self._prefills_unasked and (document is not None or inexact is not None):
                self._idle_prefill.start(document, tenant, inexact)


def _record_answers(encoding: EncodingThread, responses: Sequence[PromptGeneration]) -> None:
    """Record answers in their prompts' documents."""
    answers = [answered(response) for response in responses if response.prompt.document]
    if answers:
        encoding.start(PromptEncoder.record_answers, answers)


def _stopping() -> StoppingError:
    return StoppingError("the server is stopping; try again in a moment", retry_after=1)


def _least_confidence(rule: ConfidenceRule | None, asked: float | None) -> float | None:
    """Return how sure answers must be that editors get; None gives them all.

    Args:
        rule: the model's; None if it doesn't say how sure it is.
        asked: what the server was started with: None takes the rule's, and 0 gives all answers.
    """
    if asked is None:
        return None if rule is None else rule.threshold or None
    if asked and rule is None:
        _log.warning("the model doesn't say how sure it is: editors get all of its answers")
    return asked or None
