"""Engine: the step loop.

A step goes through six stages:

0. KV is copied from and to elsewhere, a bounded part of it (``kv_transfer``);
1. the policies plan it from the queues' state (``scheduler.py``, ``policies/``);
2. drafts are proposed and chosen (``speculation.py``);
3. the plan is applied: preemptions, admissions, slots (``plan_execution.py``);
4. the runner computes one packed batch (``batching.py``);
5. tokens are sampled, drafts verified (``verification.py``), and both tokens and KV are taken over
   (``step_commit.py``).
"""

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from midfill.arrays import Float32Array
from midfill.engine.kv_transfer.transfers import IdentitySource
from midfill.engine.kv_transfer.warm_cache import KvTraffic
from midfill.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    TenantStats,
)
from midfill.engine.sampling.sampler import is_greedy
from midfill.engine.sampling.vocabulary import Vocabulary
from midfill.engine.scheduling.admission import Deadlines
from midfill.engine.scheduling.drafting import Draft
from midfill.engine.scheduling.scheduler import (
    Hints,
    ProgramId,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
)
from midfill.engine.scheduling.step_cost import StepTimeLimit
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.retention import Retention
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.batching import ScheduledSequence, observed_rows, schedule
from midfill.engine.step.counters import EngineCounters, TenantCounters
from midfill.engine.step.layered_step import StepOutputs, run_interruptible_step, run_step
from midfill.engine.step.plan_execution import PlanExecution
from midfill.engine.step.speculation import DraftCounts, Speculation
from midfill.engine.step.step_commit import StepCommit
from midfill.engine.step.verification import (
    append_token,
    record_scores,
    sibling_groups,
    verify,
)
from midfill.engine.validation import validate
from midfill.errors import InvalidRequestError
from midfill.kv.tiers.warm_tier import WarmTier
from midfill.methods.kinds import MethodKinds
from midfill.methods.method import Method
from midfill.methods.sequence_method import MethodKind, RequestFacts
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import KeyPairs
from midfill.runners.forward.runner import Runner

_log = logging.getLogger(__name__)


class Clock(Protocol):
    """What tells an engine the time: the module ``time``, or a simulation's clock."""

    def monotonic(self) -> float:
        """Return the time by which requests have deadlines, in seconds."""

    def perf_counter(self) -> float:
        """Return the time by which steps are measured, in seconds."""


@dataclass(frozen=True)
class EngineOptions:
    """Limits of the engine.

    Attributes:
        max_running: maximum number of sequences that hold KV at a time.
        context: maximum number of tokens in a sequence, prompt and answer; None uses the model's
            own, which can't be exceeded.
        lookahead: how many waiting sequences the policy sees at least; 0 shows it no more than it
            could admit.
    """

    max_running: int = 128
    context: int | None = None
    lookahead: int = 0

    def context_of(self, config: ModelConfig) -> int:
        """Return the maximum number of tokens in a sequence of a model."""
        return min(config.context, self.context or config.context)


class Engine:
    """Continuous batching over one runner. Not thread-safe: one owner calls it.

    Computed KV stays in the prefix cache until its slots are needed: that of prompts after each
    chunk, that of answers when they end, are cancelled or preempted.

    Attributes:
        interrupted: asked amid a step of offline requests whether somebody waits for another one;
            the step is given up then.
    """

    def __init__(
        self,
        runner: Runner,
        eos_token_ids: SequenceOf[int],
        options: EngineOptions,
        *,
        policy: SchedulerPolicy,
        speculation: Speculation | None = None,
        step_limit: StepTimeLimit | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        method: Method | None = None,
        find_method: Callable[[str], Method | None] | None = None,
        kinds: SequenceOf[MethodKind] = (),
        kv_source: IdentitySource | None = None,
        warm_tier: WarmTier | None = None,
        retention: Retention | None = None,
        clock: Clock = time,
    ) -> None:
        """Create an idle engine; ``engine.loading`` composes its parts.

        Args:
            runner: the model and its KV cache.
            eos_token_ids: token ids that end an answer, unless the request sets ``ignore_eos``.
            options: limits.
            policy: decides what each step runs, drafts excepted.
            speculation: adds drafts to each step; None runs none, as models with states do.
                Answers are the same with and without.
            step_limit: makes the chunks of prompts smaller where steps take long; None doesn't.
            token_bytes: returns a token's bytes, b"" for ids without text; None refuses requests
                with ``begins_with``.
            method: decides which of a prompt's keys stay, which are taken from elsewhere, or which
                its rows attend to, where the request names no method; None computes and keeps all.
            find_method: returns the method that a request names, or raises InvalidRequestError;
                None refuses such requests.
            kinds: of methods beside the registered ones.
            kv_source: what exported KV is bound to; None binds it to the runner's layout alone.
            warm_tier: keeps KV that may be evicted; None keeps none.
            retention: keeps the KV of programs between their requests; None leaves it to the cache.
            clock: tells the time, also that by which requests arrive and have deadlines.

        Raises:
            InvalidRequestError: ``method`` is of several that can't stand together.
            ValueError: so many sequences can't run, since each needs a state.
        """
        states = runner.states
        if states is not None and options.max_running >= states.count:
            raise ValueError(
                f"{options.max_running} running sequences need more than {states.count} states"
            )
        self._runner = runner
        self._eos_token_ids = frozenset(eos_token_ids)
        self._policy = policy
        # A state can't go back before tokens that turn out to be wrong.
        self._speculation = speculation if states is None else None
        self._step_limit = step_limit
        self._prefill_share: int | None = None
        self._retention = retention
        self._vocabulary = Vocabulary(token_bytes, runner.config.vocab)
        self._context = options.context_of(runner.config)
        self._queues = RequestQueues(runner.slots, options.max_running, options.lookahead, states)
        self._clock, self._now = clock, -inf
        self._deadlines = Deadlines(self._queues.__contains__)
        self._methods = MethodKinds(runner, self._queues.pool, kinds)
        self._methods.check(method)
        self._method, self._find_method = method, find_method
        self.interrupted: Callable[[], bool] | None = None
        self._undelivered: list[EngineOutput] = []
        self._next_sequence_id = 0
        self._counters, self._tenants = EngineCounters(), TenantCounters()
        self.kv_traffic = KvTraffic(runner, self._queues, kv_source, warm_tier)
        self._execution = PlanExecution(
            runner.config.layers, self._queues, self._counters, self._tenants
        )
        self._commit = StepCommit(
            self._queues,
            self._execution,
            self.kv_traffic,
            self._counters,
            self._tenants,
            on_finish=self._finish_turn,
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request; ``step`` returns its outputs.

        Raises:
            InvalidRequestError: the request can never run, or its request_id is in flight. A
                background prompt that doesn't fit the pool is not refused but dropped later.
        """
        method = self._method_of(request)
        max_length = self._context
        if not request.background:
            max_length = self._methods.max_length(method, _facts(request), max_length)
        validate(request, self._runner.config.vocab, max_length)
        if request.request_id in self._queues:
            raise InvalidRequestError(
                f"a request with id {request.request_id!r} is in flight already",
                param="request_id",
            )
        now = self._time()
        sequence = Sequence(
            request,
            self._next_sequence_id,
            max_length,
            self._eos_token_ids,
            arrived=now,
            hints=self._hints(request, now),
        )
        sequence.constraint = self._vocabulary.constraint(request, sequence.stop_token_ids)
        if not request.background:
            sequence.check_empty(request.empty_threshold, len(request.begins_with))
            sequence.method = self._methods.attach(method, _facts(request), sequence)
        self._next_sequence_id += len(sequence.answer_indices)
        self._resume(sequence, request.answered)
        self._deadlines.add(request)
        if self.kv_traffic.starts_loading(sequence):
            self._queues.hold(sequence)
        else:
            self._queues.add(sequence)

    def check_method(self, method: Method | None) -> None:
        """Check that requests can use a method.

        Raises:
            InvalidRequestError: they can't, whatever they ask.
        """
        self._methods.check(method)

    def prepare(self) -> None:
        """Do now what the first request with ``begins_with`` would wait for."""
        self._vocabulary.prepare()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers, and release its slots.

        The next step returns an output with finish reason "cancelled" for each unfinished answer.
        Unknown ids are ignored: the request may just have ended.
        """
        for sequence in self._queues.sequences_of(request_id):
            cancelled = [
                answer for answer in sequence.answer_indices if index is None or answer == index
            ]
            if len(cancelled) == len(sequence.answer_indices):
                self.kv_traffic.forget(sequence)
                self._undelivered += self._queues.end(sequence, "cancelled")
                self._finish_turn(sequence, "cancelled")
            elif cancelled:
                self._undelivered += sequence.final_outputs("cancelled", indices=cancelled)
                remaining = [
                    answer for answer in sequence.answer_indices if answer not in cancelled
                ]
                sequence.answer_indices = tuple(remaining)

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._queues or self._undelivered or self.kv_traffic) or self._is_pin_due()

    def idle_seconds(self) -> float | None:
        """How long an idle engine may sleep until ``step`` has something to do; None: for ever."""
        deadline = None if self._retention is None else self._retention.next_deadline
        return None if deadline is None else max(deadline - self._time(), 0.0)

    def step(self) -> list[EngineOutput]:
        """Run one forward pass over what the policies choose; return the new outputs.

        If the runner raises, the answers in that pass end with finish reason "error"; the others
        continue.
        """
        started = self._clock.perf_counter()
        outputs, self._undelivered = self._undelivered, []
        if self.kv_traffic:
            self.kv_traffic.step(may_wait=not outputs)
        outputs += self._expire()
        self._queues.pool.trim()
        if self._queues:
            plan, drafts = self._plan()
            for sequence_id in plan.drop:
                outputs += self._queues.end(self._queues.sequences[sequence_id], "cancelled")
            outputs += self._execution.apply(plan)
            self._note_admissions(plan)
            plan = self._execution.run_method_chunks(plan, outputs)
            scheduled = schedule(plan, drafts, self._queues.sequences, self._runner.config.layers)
            if scheduled:
                outputs += self._run(scheduled)
        elif self._is_pin_due():
            self._release_pins(self._queues.state(self._time()))
        self._counters.busy_seconds += self._clock.perf_counter() - started
        return outputs

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt with its answer's first, where it names no method."""
        return self._methods.longest_prompt(self._method, self._context)

    @property
    def key_pairs(self) -> KeyPairs:
        """What was computed of prompts' attention under methods of sparse prefill."""
        return self._methods.key_pairs

    def take_parked_bytes(self) -> int:
        """Return the most KV that a method has kept outside the pool for one sequence.

        Counted since this was last asked.
        """
        return self._methods.take_parked_bytes()

    def stats(self) -> EngineStats:
        """Return gauges and counters as of now."""
        drafts = DraftCounts() if self._speculation is None else self._speculation.counts
        pinned = 0 if self._retention is None else self._retention.pinned_slots(self._queues)
        return self._counters.stats(self._queues, drafts, self.key_pairs, self.kv_traffic, pinned)

    def tenant_stats(self) -> dict[str, TenantStats]:
        """Return the numbers of every tenant that has or had a request, as of now."""
        return self._tenants.stats(self._queues.running, self._queues.waiting.counts())

    def find_method(self, specification: str) -> Method | None:
        """Return the method that a request may name; None computes everything and keeps it.

        Raises:
            InvalidRequestError: it can't be used.
        """
        if self._find_method is None:
            raise InvalidRequestError("requests can't choose a method here", param="method")
        return self._find_method(specification)

    def _method_of(self, request: EngineRequest) -> Method | None:
        """Return the method for a request's prompt; None computes and keeps its KV.

        Raises:
            InvalidRequestError: the request names a method that can't be used.
        """
        return self._method if request.method is None else self.find_method(request.method)

    def _resume(self, sequence: Sequence, answered: SequenceOf[int]) -> None:
        """Bring a new sequence to where it was after tokens that another engine has sampled."""
        if answered and sequence.empty_check is not None:  # there it was found not to be empty
            sequence.empty_check, sequence.not_empty = None, True
        for token_id in answered:
            if not is_greedy(sequence.params):
                sequence.random_stream.draw()  # the number that this token was sampled with
            append_token(sequence, token_id, self._vocabulary)

    def _expire(self) -> list[EngineOutput]:
        """End the requests that nobody waits for any more, before a step is spent on them."""
        outputs: list[EngineOutput] = []
        for deadline in self._deadlines.take_expired(self._time()):
            for sequence in self._queues.sequences_of(deadline.request_id):
                if deadline.whole or sequence.length == sequence.prompt_length:
                    outputs += self._queues.end(sequence, "expired")
        return outputs

    # --- planning ---

    def _time(self) -> float:
        """Return the time; where the clock is set back, it stands still."""
        self._now = max(self._now, self._clock.monotonic())
        return self._now

    def _plan(self) -> tuple[StepPlan, Mapping[int, Draft]]:
        """Return the step's plan and, by sequence id, the drafts that were proposed for it."""
        state = self._release_pins(self._queues.state(self._time()))
        if self._prefill_share is not None:
            state = replace(state, prefill_share=self._prefill_share)
        if self._step_limit is not None:
            state = self._step_limit.inform(state)
        plan = self._policy.plan(state)
        self._prefill_share = plan.prefill_share
        if self._speculation is None:
            return plan, {}
        return self._speculation.plan(state, plan, self._queues.sequences)

    # --- programs, whose KV may be kept between their requests ---

    def _hints(self, request: EngineRequest, now: float) -> Hints:
        """Return what policies see of a new request's hints.

        Args:
            request: a valid request.
            now: when it arrived.
        """
        hints = _hints(request, now)
        if hints.program is None or self._retention is None:
            return hints
        arrived = self._retention.record_arrival(hints.program, now)
        return hints._replace(program_arrived=arrived)

    def _is_pin_due(self) -> bool:
        return self._retention is not None and self._retention.is_due(self._time())

    def _release_pins(self, state: ScheduleState) -> ScheduleState:
        """Return a state without the pins that are due, or in the way; with all others."""
        return state if self._retention is None else self._retention.release(self._queues, state)

    def _note_admissions(self, plan: StepPlan) -> None:
        if self._retention is None:
            return
        for chunk in plan.admit:
            sequence = self._queues.sequences.get(chunk.sequence_id)
            if sequence is not None:
                self._retention.record_admission(self._queues, sequence, self._now)

    def _finish_turn(self, sequence: Sequence, reason: FinishReason) -> None:
        """Have the KV of a finished sequence kept, where it will be needed soon.

        An answer that is cancelled may have come to a stop string, which the engine doesn't know.
        """
        if self._retention is not None and sequence.index == 0 and sequence.decoding:
            complete = reason in ("stop", "cancelled")
            self._retention.finish_turn(self._queues, sequence, self._time(), complete=complete)

    # --- the forward pass and its results ---

    def _run(self, scheduled: list[ScheduledSequence]) -> list[EngineOutput]:
        """Run one forward pass, sample, commit the results and return the outputs."""
        started = self._clock.perf_counter()
        try:
            ran = self._run_step(scheduled)
            if ran is None:
                return []
            logits, queries = ran
            _hand_out(scheduled, queries)
            computed = self._clock.perf_counter()
            groups = sibling_groups(scheduled)
            record_scores(self._runner.logits_ops, logits, scheduled)
            answers = [answer for _, group in groups for answer in group]
            verify(self._runner, logits, answers, self._vocabulary)
            sampled = self._clock.perf_counter()
        except Exception as error:
            _log.exception("a forward pass over %d sequences failed", len(scheduled))
            return self._queues.fail(
                [entry.sequence for entry in scheduled], f"the model failed: {error}"
            )
        rows = sum(entry.rows for entry in scheduled if entry.completes)
        self._counters.steps += 1
        self._counters.computed_tokens += rows
        self._counters.forward_seconds += computed - started
        self._counters.sampling_seconds += sampled - computed
        self.kv_traffic.record_step(rows, sampled - started)
        if all(entry.span is None and not _is_sparse(entry) for entry in scheduled):
            keys = sum(entry.rows * (entry.sequence.computed + entry.rows) for entry in scheduled)
            for learner in (self._speculation, self._step_limit, self._retention):
                if learner is not None:
                    learner.record_step(rows, keys / rows, sampled - started)
        if self._speculation is not None:
            for entry, group in groups:
                self._speculation.record_verification(entry, group[0].verified_token_ids)
        return self._commit.commit(scheduled, [group for _, group in groups])

    def _run_step(self, scheduled: list[ScheduledSequence]) -> StepOutputs | None:
        """Run a step; None if it was given up, and the sequences are as before it."""
        if (
            self.interrupted is None
            or self._runner.states is not None  # which have advanced in some layers then
            or not all(map(_may_be_given_up, scheduled))
        ):
            return run_step(self._runner, scheduled)
        ran = run_interruptible_step(self._runner, scheduled, self.interrupted)
        if ran is None:
            for entry in scheduled:
                sequence = entry.sequence
                held = sequence.computed if sequence.decoding else sequence.length
                sequence.held.truncate(held)
        return ran


def _may_be_given_up(entry: ScheduledSequence) -> bool:
    """Whether nobody waits for a sequence, and a part of its step leaves nothing behind."""
    sequence = entry.sequence
    return sequence.hints.offline and sequence.method.is_null and sequence.layer_rows is None


def _facts(request: EngineRequest) -> RequestFacts:
    """Return what methods may know of a request."""
    prompt = len(request.token_ids)
    return RequestFacts(
        prompt=prompt,
        compress_after=request.compress_after or prompt,
        contexts=request.contexts,
        before_caret=request.before_caret,
        after_caret=request.after_caret,
        answers=request.sampling.n,
        scores_prompt=request.sampling.prompt_logprobs is not None,
        token_ids=request.token_ids,
    )


def _hints(request: EngineRequest, now: float) -> Hints:
    """Return what policies see of a request's hints.

    Args:
        request: a valid request.
        now: when it arrived.
    """
    given, expected = request.hints, request.hints.expected_tokens
    ours = request.background or request.answered or given.offline
    named = bool(given.program) and not ours
    if expected is not None:
        expected = min(max(expected, 1), request.sampling.max_tokens)
    return Hints(
        priority=given.priority,
        deadline=inf if request.deadline is None else request.deadline,
        expected_tokens=expected,
        program=ProgramId(request.tenant, given.program) if named else None,
        program_arrived=now,
        last_step=given.last_step,
        offline=given.offline,
    )


def _is_sparse(entry: ScheduledSequence) -> bool:
    """Whether a sequence's rows attend to listed keys, so that their time says little of others."""
    return entry.sequence.method.atomic_tokens(entry.sequence.computed) > 0


def _hand_out(
    scheduled: SequenceOf[ScheduledSequence], queries: SequenceOf[Float32Array | None]
) -> None:
    """Give methods the queries that they have had observed.

    Args:
        scheduled: what ran.
        queries: see ``layered_step.StepOutputs``.
    """
    for entry, own in zip(scheduled, queries, strict=True):
        if own is not None:
            first = entry.sequence.computed + observed_rows(entry).start
            entry.sequence.method.observe(first, own)
