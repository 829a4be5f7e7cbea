"""One API request in the server: its answers while they are generated, and what is known of it."""

import asyncio
import contextlib
import dataclasses
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakSet, WeakValueDictionary

import msgspec

from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import (
    NO_REQUEST_HINTS,
    EngineOutput,
    EngineRequest,
    RequestHints,
)
from midfill.errors import DeadlineError, InvalidRequestError, UnavailableError
from midfill.frontend.answer import AnswerDelta
from midfill.frontend.generation import GenerationResult, PromptGeneration, Usage, whole_answers
from midfill.frontend.prompt import Prompt
from midfill.frontend.sampling import SamplingParams
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.metrics import TenantMetrics
from midfill.serving.server.served_engine import ServedEngine

MAX_ANSWERS_PER_REQUEST = 1024
HOLE_TEMPERATURE = 0.2  # of an infill request that names none; Codestral's
_HOLE_MAX_TOKENS, _HOLE_SOFT_MAX_TOKENS = 128, 96
_OWN = b"x-request-timeout"
_LIBRARIES = (b"x-stainless-read-timeout", b"x-stainless-timeout")
_ENGINE_SECONDS = 0.25  # for the engine to say itself that a deadline has passed


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a request took so far, in seconds.

    Attributes:
        prompt: from its submission to the first token.
        generation: from there to the last token.
    """

    prompt: float
    generation: float


@dataclass(slots=True)
class PromptTimes:
    """When the stages of a prompt's answers began, by ``time.perf_counter``.

    Attributes:
        submitted: when it was sent to the engine; None until then.
        admitted: when it left the engine's queue; None until its first output.
        first_token, last_token: when the server got them; None until then.
    """

    submitted: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def queued(self) -> float | None:
        """Seconds in the queue, the way to the engine and back included; None until admitted."""
        if self.submitted is None or self.admitted is None:
            return None
        return self.admitted - self.submitted


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a dialect wants generated.

    Attributes:
        prompts: what to answer.
        sampling: how.
        tenant: whose cache to use.
        streamed: whether answers are reported before they end.
        supersedes: the client's name for a document whose older requests end now, if they gave the
            name, too, and are for another text; None ends none, and this one is not ended.
        hints: what the client says of the request for the scheduler.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    tenant: str
    streamed: bool = False
    supersedes: str | None = None
    hints: RequestHints = NO_REQUEST_HINTS


class Generation:
    """The answers to one API request.

    Attributes:
        responses: one per prompt.
        sampling: how the answers are generated.
        prompt_times: the times of each prompt.
        finish_reasons: why answers ended, of all that did.
        group: what keeps the requests together that may supersede this one; see ``superseding``.
    """

    def __init__(
        self,
        engine: ServedEngine,
        metrics: TenantMetrics,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        tenant: str,
        limits: RateLimits,
        stream_interval: float,
        on_complete: Callable[[Sequence[PromptGeneration]], None],
        on_end: Callable[[Sequence[PromptGeneration]], None] = lambda _: None,
        request_id: str = "",
        arrived: float | None = None,
        deadline: float | None = None,
        streamed: bool = False,
        hints: RequestHints = NO_REQUEST_HINTS,
    ) -> None:
        """Prepare the requests; ``deltas`` submits them.

        Args:
            engine: where they run.
            metrics: counts them.
            tokenizer: turns their tokens into text.
            prompts: the prompts.
            sampling: how their answers are generated.
            tenant: whose prefix cache to use.
            limits: what tenants may use.
            stream_interval: see ``EngineRequest``.
            on_complete: called with ``responses`` once all answers are complete.
            on_end: called with ``responses`` once they end, complete or not.
            request_id: the API request's id; the ids of the engine's requests begin with it.
            arrived: when it arrived, by ``time.perf_counter``; None: now.
            deadline: when its client gives up, by ``time.monotonic``; None: never.
            streamed: whether answers are shown while they arrive.
            hints: what its client says of it for the scheduler.
        """
        self._engine = engine
        self._metrics = metrics
        self._limits = limits
        self._tenant = tenant
        self._on_complete = on_complete
        self._on_end = on_end
        self._answers = len(prompts) * sampling.n
        self.group: object = None
        self._outputs: OutputStream | None = None
        self._superseded = False
        self._failure: UnavailableError | None = None
        # Clients choose request ids, so they may be used twice.
        identity = f"{request_id}-{uuid.uuid4().hex}".lstrip("-")
        self._requests = [
            prompt.request(
                f"{identity}-{index}", sampling, tenant, stream_interval, deadline, hints
            )
            for index, prompt in enumerate(prompts)
        ]
        self._places = {request.request_id: i for i, request in enumerate(self._requests)}
        self.responses = [
            PromptGeneration(prompt, sampling, tokenizer, streamed=streamed) for prompt in prompts
        ]
        self.finish_reasons: list[str] = []
        self._deadline = deadline
        self._whole = stream_interval == math.inf
        self._started = time.perf_counter()
        self._arrived = self._started if arrived is None else arrived
        self.sampling = sampling
        self.prompt_times = [PromptTimes() for _ in prompts]
        self._last_token: dict[tuple[int, int], float] = {}

    @property
    def times(self) -> PromptTimes:
        """The times of the prompt that had the first token, or is the first."""
        return min(self.prompt_times, key=lambda times: times.first_token or math.inf)

    @property
    def timings(self) -> Timings:
        """How long the prompts and their answers took so far."""
        first = self.times.first_token or time.perf_counter()
        return Timings(first - self._started, max(self._last_token.values(), default=first) - first)

    @property
    def usage(self) -> Usage:
        """The cost of all prompts so far."""
        return sum((response.usage for response in self.responses), Usage())

    @property
    def texts(self) -> tuple[tuple[str, str] | tuple[int, ...], ...]:
        """What the answers are to: each prompt's text around the caret, or its tokens."""
        return tuple(
            (prompt.prefix, prompt.suffix) if prompt.infilling else tuple(prompt.token_ids)
            for prompt in (response.prompt for response in self.responses)
        )

    def supersede(self) -> None:
        """End all answers: each unfinished one has a last delta with reason "superseded"."""
        self._superseded = True
        if self._outputs is not None:
            self._outputs.end()

    def fail(self, error: UnavailableError) -> None:
        """End all answers with an error."""
        self._failure = error
        if self._outputs is not None:
            self._outputs.put(error)

    async def deltas(self) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
        """Submit the requests; yield (prompt index, delta) until all answers are complete.

        Once they are superseded, each unfinished answer ends without the text that was held back.
        Closing the generator early ends the requests in the engine.

        Raises:
            InvalidRequestError: the engine can never run one of the prompts.
            GenerationError: the engine failed on one of them.
            QueueFullError: too many tokens are queued.
            RateLimitError: the tenant has used what it may.
            EngineDeadError: the engine is not ready, or it died.
            DeadlineError: the client doesn't wait any more, whatever the engine does.
            StoppingError: the server is about to end.
        """
        prompt_tokens = sum(len(request.token_ids) for request in self._requests)
        with self._limits.generating(self._tenant, prompt_tokens) as charge:
            timer = self._start_timer()
            try:
                async with contextlib.aclosing(self._deltas()) as deltas:
                    async for delta in deltas:
                        yield delta
            finally:
                if timer is not None:
                    timer.cancel()
                charge.tokens = self.usage.completion_tokens
                self._on_end(self.responses)

    def _start_timer(self) -> asyncio.TimerHandle | None:
        """Have the answers end at their deadline, also if the engine says nothing.

        As in the engine, a streamed answer that has begun goes on.
        """
        if self._deadline is None:
            return None

        def expire() -> None:
            if self._whole or not self._last_token:
                self.fail(DeadlineError.passed())

        seconds = self._deadline - time.monotonic() + _ENGINE_SECONDS
        return asyncio.get_running_loop().call_later(seconds, expire)

    async def _deltas(self) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
        complete = 0
        now = time.perf_counter()
        for times in self.prompt_times:
            times.submitted = now
        try:
            if self._failure is not None:
                raise self._failure
            if not self._superseded:
                with self._engine.submit(*self._requests) as self._outputs:
                    async for output in self._outputs:
                        place = self._places[output.request_id]
                        for delta in self._push(place, output, self._outputs):
                            complete += delta.finish_reason is not None
                            yield place, delta
            if not self._superseded:
                self._on_complete(self.responses)
                return
            for place, response in enumerate(self.responses):
                for delta in response.abandon("superseded"):
                    complete += 1
                    self.finish_reasons.append("superseded")
                    self._metrics.answer_finished("superseded")
                    yield place, delta
        finally:
            for _ in range(self._answers - complete):
                self._metrics.answer_finished("abort")

    async def whole(self) -> list[GenerationResult]:
        """Return the answers to each prompt, once all are complete. Raises what ``deltas`` does."""
        pieces: list[list[AnswerDelta]] = [[] for _ in self.responses]
        async for place, delta in self.deltas():
            pieces[place].append(delta)
        return list(map(whole_answers, self.responses, pieces))

    def _push(
        self, place: int, output: EngineOutput, outputs: OutputStream
    ) -> Iterator[AnswerDelta]:
        """Turn an output into text, and count it; start and end what has to be after it."""
        response, request = self.responses[place], self._requests[place]
        if output.request_id == request.request_id:  # not a branch
            if output.prefill_seconds is not None:
                self.prompt_times[place].admitted = time.perf_counter() - output.prefill_seconds
            if output.token_ids:
                self._record_tokens(place, output.index, len(output.token_ids))
        delta = response.push(output)
        if delta is not None:
            if delta.finish_reason is not None and output.finish_reason is None:
                # A stop string has ended the answer, or it is not sure enough: the engine does not
                # know.
                outputs.cancel(output.request_id, output.index)
            yield self._counted(place, delta)
        follow_up = response.follow_up(request)
        if follow_up.requests and not self._start(place, follow_up.requests, outputs):
            delta = response.refuse(follow_up.requests)
            if delta is not None:
                yield self._counted(place, delta)
            follow_up = response.follow_up(request)
        for request_id in follow_up.ended:
            outputs.cancel(request_id)

    def _start(self, place: int, requests: Sequence[EngineRequest], outputs: OutputStream) -> bool:
        """Start further requests of a prompt; return whether the engine takes them."""
        try:
            outputs.absorb(self._engine.submit(*requests))
        except UnavailableError:
            return False
        self._places |= {request.request_id: place for request in requests}
        return True

    def _counted(self, place: int, delta: AnswerDelta) -> AnswerDelta:
        """Return a delta, counted if it is an answer's last one."""
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            self._metrics.answer_finished(delta.finish_reason)
            response = self.responses[place]
            if response.finished:
                self._record_finished(response.usage, self.prompt_times[place])
        return delta

    def _record_tokens(self, place: int, index: int, tokens: int) -> None:
        """Record the latency of an answer's new tokens."""
        now = time.perf_counter()
        times = self.prompt_times[place]
        times.first_token, times.last_token = times.first_token or now, now
        before = self._last_token.get((place, index))
        if before is not None:
            self._metrics.next_tokens(now - before, tokens)
        elif index == 0:
            self._metrics.first_token(now - self._arrived)
        self._last_token[place, index] = now

    def _record_finished(self, usage: Usage, times: PromptTimes) -> None:
        """Record what the answers to a prompt took."""
        self._metrics.request_finished(
            time.perf_counter() - self._arrived,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
        )
        admitted, first, last = times.admitted, times.first_token, times.last_token
        if times.queued is not None and admitted and first and last:
            self._metrics.stages_finished(times.queued, first - admitted, last - first)


def check_answer_count(prompts: int, answers: int) -> None:
    """Refuse requests for too many answers.

    Raises:
        InvalidRequestError: more than MAX_ANSWERS_PER_REQUEST.
    """
    if prompts * answers > MAX_ANSWERS_PER_REQUEST:
        raise InvalidRequestError(
            f"{prompts} prompts with {answers} answers each are too many;"
            f" at most {MAX_ANSWERS_PER_REQUEST} answers per request",
            param="prompt" if prompts > answers else "n",
        )


def limited_to_a_hole(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters of an infill request that doesn't say how long its answer may be.

    Editors leave the limit out, and insert what they get.
    """
    ends = dataclasses.replace(sampling.post_processing, soft_max_tokens=_HOLE_SOFT_MAX_TOKENS)
    return msgspec.structs.replace(sampling, max_tokens=_HOLE_MAX_TOKENS, post_processing=ends)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """One request. Times are ``time.perf_counter()``'s.

    Attributes:
        request_id: the client's ``X-Request-Id``, or a new one.
        method, path: of the request.
        headers: of the request, names in lower case.
        arrived: when its head had arrived.
        tenant: who sent it; None if that was not asked, "" if there are no keys.
        body_bytes: size of its body; None until it is read.
        encodings: start and end of each time that it had something encoded, waiting included.
        model: name of the model that answers; None if none does.
        generation: its answers; None if it has none.
        error: code of the error that the client gets, or the error's kind; None without one.
        status: the HTTP status; None until it is sent.
        complete: whether the whole response was sent.
        abandoned: whether the client disconnected before that.
        trace_id: id of its trace; None if it has none.
    """

    request_id: str
    method: str
    path: str
    arrived: float
    headers: Sequence[tuple[bytes, bytes]] = ()
    tenant: str | None = None
    body_bytes: int | None = None
    encodings: list[tuple[float, float]] = field(default_factory=list)
    model: str | None = None
    generation: Generation | None = None
    error: str | None = None
    status: int | None = None
    complete: bool = False
    abandoned: bool = False
    trace_id: str | None = None

    def deadline(self, default: float | None = None) -> float | None:
        """Return when the client gives up, by ``time.monotonic``; None if it never does.

        Args:
            default: seconds that it waits if it doesn't say so.

        Raises:
            InvalidRequestError: its headers give it no time that makes sense.
        """
        seconds = client_timeout(self.headers) or default
        if seconds is None:
            return None
        return time.monotonic() - (time.perf_counter() - self.arrived) + seconds


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)
"""The request that is being handled in a context."""


class Superseding:
    """Ends older requests of a document that a newer one replaces, as their client has marked them.

    Only requests whose client has given the document a name take part. A dialect passes it to
    ``ModelService.generate``. A request for the same text never ends another, since some clients
    send each request several times. What takes part is known as long as anybody holds it.
    """

    def __init__(self) -> None:
        # Of each document, whose requests keep what they are in.
        self._groups: WeakValueDictionary[tuple[str, str], WeakSet[Generation]]
        self._groups = WeakValueDictionary()

    def enter(self, generation: Generation, tenant: str, document: str) -> None:
        """End the older requests of a document whose text differs, and remember this one."""
        group = self._groups.setdefault((tenant, document), WeakSet())
        for older in tuple(group):
            if older.texts != generation.texts:
                older.supersede()
        group.add(generation)
        generation.group = group


def client_timeout(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Return the seconds that a client waits, by its headers; None if it does not say.

    ``X-Request-Timeout`` is midfill's own. OpenAI's libraries send their timeout without being
    asked: ``X-Stainless-Read-Timeout`` (Python) and ``X-Stainless-Timeout`` (JavaScript).

    Raises:
        InvalidRequestError: midfill's own header is no number of seconds above 0.
    """
    given = dict(headers)
    if _OWN in given:
        seconds = _seconds(given[_OWN])
        if seconds is None:
            raise InvalidRequestError.of_field(
                "X-Request-Timeout", "must be a number of seconds above 0, such as 10 or 2.5"
            )
        return seconds
    return next((_seconds(given[name]) for name in _LIBRARIES if name in given), None)


def _seconds(value: bytes) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None
