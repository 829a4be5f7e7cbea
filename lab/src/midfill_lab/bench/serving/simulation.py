"""A load on a simulated engine: the real engine and its policies, but steps only take their time.

The engine, its queues, policies, KV pool and prefix cache, the planner, the admission of requests
and what gathers outputs are those that are served. Only the model is missing: a forward pass adds
its cost to a clock that nobody waits for, and an answer is a piece of code of the wanted length. So
minutes of load take seconds, and the same load gives the same figures to the last digit. Drafts are
not simulated, since which of them are accepted depends on the model.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import lookahead, retention, scheduler_policy, step_limit
from midfill.engine.process.output_buffer import OutputBuffer
from midfill.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineSamplingParams,
    RequestHints,
)
from midfill.engine.scheduling.admission import Admission
from midfill.engine.sequences.sequence import Sequence as EngineSequence
from midfill.errors import InvalidRequestError, MidfillError, QueueFullError
from midfill.frontend.prompt import Prompt, PromptSource
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import ModelConfig
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.cells import CellLayout
from midfill.runners.forward.logits import LogitsOps
from midfill.serving.options import ServeOptions
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.serving.batch_layout import LAYOUTS, LayoutName
from midfill_lab.bench.serving.metrics import OK, UNSENT, RequestResult, request_result
from midfill_lab.bench.serving.step_costs import StepCosts, StepWork
from midfill_lab.bench.serving.workload import TimedRequest, followers, next_turn

_SCRIPT_TOKENS = 512  # of the text that answers are pieces of


class VirtualClock:
    """A clock that stands still but when it is told to advance.

    Attributes:
        now: seconds since the load's start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """See ``engine.Clock``."""
        return self.now

    def perf_counter(self) -> float:
        """See ``engine.Clock``."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class _NoCells:
    """Stands for a runner's KV cells: methods that look into them can't be simulated."""

    layout = CellLayout("none", ())

    def __getattr__(self, name: str) -> Any:
        raise MidfillError("a simulated engine holds no KV")


class CostedRunner:
    """A runner that computes nothing: its forward passes take their time on a clock.

    What stands for logits is the next token of each row: that of ``script`` at the row's place. So
    answers at consecutive places are consecutive text, and nothing needs to know whose they are.

    Args:
        config: the model's shapes.
        costs: what passes cost.
        slots: of the KV pool.
        clock: advanced by each pass.
        script: token ids that answers are pieces of.
        work_of: what a batch computes, see ``batch_layout``.
    """

    logits_ops: LogitsOps = NUMPY_LOGITS
    build = "simulated"
    states = None
    description = "simulated"
    weight_bytes = 0

    def __init__(
        self,
        config: ModelConfig,
        costs: StepCosts,
        slots: int,
        clock: VirtualClock,
        script: Sequence[int],
        work_of: Callable[[ForwardBatch], StepWork] = StepWork.of,
    ) -> None:
        self.config = config
        self._work_of = work_of
        self.slots = slots
        self._costs = costs
        self._clock = clock
        self._script = np.array(script, np.int32)

    @property
    def kv_bytes(self) -> int:
        """See ``Runner``."""
        return self.slots * self._costs.slot_bytes

    @property
    def cells(self) -> Any:
        """See ``Runner``: there are none."""
        return _NoCells()

    def forward(self, batch: ForwardBatch) -> Int32Array:
        """See ``Runner.forward``."""
        self._clock.advance(self._costs.seconds(self._work_of(batch)))
        return self._next_tokens(batch)

    def argmax_tokens(self, logits: Int32Array) -> list[int]:
        """See ``Runner.argmax_tokens``."""
        tokens: list[int] = logits.tolist()
        return tokens

    def embed(self, batch: ForwardBatch) -> Float64Array:
        """See ``Runner.embed``."""
        return np.zeros((batch.rows, 1))

    def join(self, parts: Sequence[Float64Array]) -> Float64Array:
        """See ``Runner.join``."""
        return np.concatenate(parts)

    def run_layers(
        self, batch: ForwardBatch, hidden: Float64Array, first: int, end: int
    ) -> Float64Array:
        """See ``Runner.run_layers``."""
        share = (end - first) / self.config.layers
        self._clock.advance(self._costs.layers_seconds(self._work_of(batch)) * share)
        return hidden

    def compute_logits(self, batch: ForwardBatch, hidden: Float64Array) -> Int32Array:
        """See ``Runner.compute_logits``."""
        self._clock.advance(self._costs.output * len(batch.logit_rows))
        return self._next_tokens(batch)

    def observed_queries(
        self, batch: ForwardBatch, first: int = 0, end: int | None = None
    ) -> Float32Array:
        """See ``Runner.observed_queries``: there are none."""
        raise MidfillError("a simulated engine computes no queries")

    def _next_tokens(self, batch: ForwardBatch) -> Int32Array:
        places = batch.positions[batch.logit_rows] + 1
        tokens: Int32Array = self._script[places % len(self._script)]
        return tokens


class SimulatedModel:
    """A model of which only the tokenizer and the shapes are read.

    Args:
        checkpoint: the model.
        costs: what its steps cost.
        served: how it is served.
        layout: how a step's rows lie.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        costs: StepCosts,
        served: ServeOptions,
        layout: LayoutName = "ragged",
    ) -> None:
        self.layout = layout
        self.checkpoint = checkpoint
        self.costs = costs
        self.served = served

    @property
    def options(self) -> ModelOptions:
        """How it is run."""
        return self.served.options

    @property
    def slots(self) -> int:
        """Number of tokens that the KV pool holds."""
        memory = self.options.kv_memory
        return self.costs.slots if memory is None else memory // self.costs.slot_bytes

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        return EngineOptions(context=self.options.context).context_of(self.checkpoint.config)

    def engine(self, clock: VirtualClock, tool_of: Callable[[EngineSequence], str]) -> Engine:
        """Return an engine whose steps advance a clock.

        Args:
            clock: the clock.
            tool_of: see ``Retention``.
        """
        config, options = self.checkpoint.config, self.options
        script = answer_script(self.checkpoint.tokenizer)
        work_of = LAYOUTS[self.layout]
        runner = CostedRunner(config, self.costs, self.slots, clock, script, work_of)
        return Engine(
            runner,
            self.checkpoint.tokenizer.eos_token_ids,
            EngineOptions(
                max_running=options.max_running,
                context=options.context,
                lookahead=lookahead(options),
            ),
            policy=scheduler_policy(options, config.layers),
            step_limit=step_limit(options),
            retention=retention(options, tool_of),
            clock=clock,
        )

    def encoder(self) -> PromptEncoder:
        """Return an encoder of prompts."""
        format = fim_format(self.checkpoint, self.served.fim_tokens)
        return PromptEncoder(self.checkpoint, format, self.context)


def answer_script(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that answers are pieces of: some real code, the same each time."""
    text = standard_library_documents(1)[0]
    return tokenizer.encode(text)[:_SCRIPT_TOKENS]


def simulate_load(model: SimulatedModel, requests: Sequence[TimedRequest]) -> list[RequestResult]:
    """Run a load on a simulated engine.

    Args:
        model: what is served, and how.
        requests: the load.

    Returns:
        What became of each request, in the load's order.
    """
    return _Simulation(model, requests).run()


class _Due(NamedTuple):
    """A request and when it reaches the server; sorted by time, then by place."""

    seconds: float
    place: int
    request: TimedRequest
    prompt: str


@dataclass(slots=True)
class _Answering:
    """A request in progress.

    Attributes:
        due: the request.
        prompt: as the engine got it.
        arrivals: when tokens came.
        token_ids: the answer so far.
        cached_tokens: of the prompt.
    """

    due: _Due
    prompt: Prompt
    arrivals: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0


class _Simulation:
    """One run of a load.

    Args:
        model, requests: see ``simulate_load``.
    """

    def __init__(self, model: SimulatedModel, requests: Sequence[TimedRequest]) -> None:
        self._model = model
        self._clock = VirtualClock()
        self._engine = model.engine(self._clock, self._tool_of)
        self._encoder = model.encoder()
        self._tokenizer = model.checkpoint.tokenizer
        self._buffer = OutputBuffer(self._tokenizer.token_bytes)
        served = model.served
        self._admission = Admission(served.max_queued_tokens, served.max_queued_tokens_per_key)
        self._admission.work.slots = model.slots
        self._followers = followers(requests)
        self._requests = requests
        first = (request for request in requests if not request.turn)
        self._due = [self._at(each.arrival, each, each.prompt) for each in first]
        heapq.heapify(self._due)
        self._answering: dict[str, _Answering] = {}
        self._prefills: dict[str, str] = {}  # document -> id of its background request
        self._expected: dict[str, Prompt] = {}  # by id of the background request
        self._numbers = itertools.count()
        self._results: dict[int, RequestResult] = {}

    def run(self) -> list[RequestResult]:
        """Run it to its end."""
        while self._due or self._engine.has_work():
            if not self._engine.has_work():
                self._clock.now = max(self._clock.now, self._due[0].seconds)
            while self._due and self._due[0].seconds <= self._clock.now:
                self._submit(heapq.heappop(self._due))
            self._buffer.add(self._engine.step(), self._clock.now)
            for output in self._buffer.take(self._clock.now):
                self._receive(output)
        return [self._results[request.index] for request in self._requests]

    def _at(self, seconds: float, request: TimedRequest, prompt: str) -> _Due:
        """Return a request that is sent at a time: when it reaches the engine."""
        delay = self._model.costs.request_seconds
        return _Due(seconds + delay, request.index, request, prompt)

    # --- requests ---

    def _submit(self, due: _Due) -> None:
        request = due.request
        try:
            prompt = self._encoder.encode(_source(request, due.prompt))
            engine_request = self._engine_request(due, prompt)
            self._admission.check(
                request.tenant, len(prompt.token_ids), engine_request.deadline, due.seconds,
                prompt.document,
            )  # fmt: skip
            self._engine.add(engine_request)
        except QueueFullError:
            self._end(due, None, "queue_full", due.seconds)
            return
        except InvalidRequestError as error:
            self._end(due, None, error.code or "400", due.seconds)
            return
        self._buffer.register(engine_request)
        self._admission.add([engine_request], due.seconds)
        self._answering[engine_request.request_id] = _Answering(due, prompt)

    def _engine_request(self, due: _Due, prompt: Prompt) -> EngineRequest:
        request = due.request
        deadline = None if request.deadline is None else due.seconds + request.deadline
        return EngineRequest(
            request_id=f"{next(self._numbers)}",
            token_ids=prompt.token_ids,
            sampling=EngineSamplingParams(
                max_tokens=request.max_tokens + bool(request.tool),
                temperature=0.0,
                ignore_eos=True,
            ),
            tenant=request.tenant,
            stream_interval=0.0 if request.tool else self._model.served.stream_interval,
            document=prompt.document,
            deadline=deadline,
            hints=_hints(request),
        )

    # --- outputs ---

    def _receive(self, output: EngineOutput) -> None:
        answer = self._answering.get(output.request_id)
        if answer is None:
            self._receive_prefill(output)
            return
        now = self._clock.now
        self._admission.record(output, now)
        if output.token_ids:
            answer.arrivals.append(now)
            answer.token_ids += output.token_ids
            answer.cached_tokens = output.cached_tokens or 0
        if answer.due.request.tool and len(answer.token_ids) == answer.due.request.max_tokens:
            # The answer calls a tool, and the server ends it there, as at a stop string.
            self._engine.cancel(output.request_id)
            del self._answering[output.request_id]
            self._end(answer.due, answer, OK, now)
            return
        if output.finish_reason is None:
            return
        del self._answering[output.request_id]
        complete = output.finish_reason in ("length", "stop")
        status = OK if complete else _STATUSES.get(output.finish_reason, output.finish_reason)
        self._end(answer.due, answer, status, now)
        if complete and self._model.served.idle_prefill:
            self._prefill_next(answer)

    def _tool_of(self, sequence: EngineSequence) -> str:
        """Return the tool that an answer of the load calls: what it says is no call of any."""
        answer = self._answering.get(sequence.request_id)
        return "" if answer is None else answer.due.request.tool

    def _end(self, due: _Due, answer: _Answering | None, status: str, now: float) -> None:
        """Record what became of a request; let its program go on, or end."""
        request = due.request
        sent = due.seconds - self._model.costs.request_seconds
        self._results[request.index] = request_result(
            request,
            due=sent,
            sent=sent,
            arrivals=[] if answer is None else answer.arrivals,
            ended=now,
            prompt_tokens=0 if answer is None else len(answer.prompt.token_ids),
            cached_tokens=0 if answer is None else answer.cached_tokens,
            completion_tokens=0 if answer is None else len(answer.token_ids),
            status=status,
        )
        turn = self._followers.get(request.index)
        if turn is None:
            return
        if status == OK and answer is not None:
            text = self._tokenizer.decode(answer.token_ids)
            heapq.heappush(
                self._due, self._at(now + turn.arrival, turn, next_turn(due.prompt, text, turn))
            )
        else:
            self._end(self._at(now, turn, ""), None, UNSENT, now)

    # --- what is computed in idle time, as by ``serving.server.service.IdlePrefill`` ---

    def _prefill_next(self, answer: _Answering) -> None:
        """Start to prefill what the answer's document will probably need next."""
        document = answer.prompt.document
        if not document:
            return
        if (earlier := self._prefills.pop(document, None)) is not None:
            self._engine.cancel(earlier)
        expected = self._encoder.expected_prompt(document)
        if expected is None:
            return
        request = expected.background_request(answer.due.request.tenant)
        request = msgspec.structs.replace(request, request_id=f"prefill-{next(self._numbers)}")
        self._engine.add(request)
        self._prefills[document] = request.request_id
        self._expected[request.request_id] = expected

    def _receive_prefill(self, output: EngineOutput) -> None:
        expected = self._expected.pop(output.request_id, None)
        if expected is None:
            return
        if self._prefills.get(expected.document) == output.request_id:
            del self._prefills[expected.document]
        if output.finish_reason == "stop":
            self._encoder.record_computed(expected)


_STATUSES = {"expired": "deadline_exceeded"}
"""The server's codes for ends of an answer."""


def _hints(request: TimedRequest) -> RequestHints:
    """Return a request's hints, as the server makes them of the request's body."""
    said = request.hints
    return RequestHints(
        priority=said.get("priority", 0),
        expected_tokens=said.get("expected_tokens"),
        program=said.get("job_id", ""),
        last_step=said.get("is_last_step", False),
    )


def _source(request: TimedRequest, prompt: str) -> PromptSource:
    """Return what a request's prompt is made of, as the server makes it of the request's body."""
    text = InfillRequest(
        prefix=prompt,
        suffix=request.suffix or "",
        raw=request.suffix is None,
        tenant=request.tenant,
    )
    return PromptSource(text=text, tenant=request.tenant)
