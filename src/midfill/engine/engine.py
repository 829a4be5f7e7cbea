"""Engine: the step loop."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from midfill.engine.advance import Advance, advance
from midfill.engine.packing import Scheduled, pack
from midfill.engine.policies.idle_prefill import IdlePrefill
from midfill.engine.policies.sarathi_serve import SarathiServe
from midfill.engine.policies.smart_spec import SmartSpec
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats, FinishReason
from midfill.engine.roster import Roster
from midfill.engine.scheduler import SchedulerPolicy, StepPlan
from midfill.engine.sequence import Sequence
from midfill.engine.speculation import DraftCounts, Speculation
from midfill.engine.step_cost import StepCost
from midfill.engine.validation import validate
from midfill.engine.vocabulary import Vocabulary
from midfill.errors import InvalidRequestError
from midfill.forward.runner import Runner

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs.

    Attributes:
        token_budget: most tokens a step runs (more only if the decoding sequences alone are
            more). Larger: prompts finish sooner; smaller: shorter gaps between the tokens of
            those that decode.
        max_running: most sequences that hold KV at a time.
        context: most tokens of a sequence, prompt and answer; None takes the model's own, which
            is also the most it can be.
        background_chunk: most tokens a step of prompts that are only to be cached.
        max_background: most such prompts that are kept; the oldest go.
    """

    token_budget: int = 128
    max_running: int = 128
    context: int | None = None
    background_chunk: int = 64
    max_background: int = 64


class Engine:
    """Continuous batching over one runner. Not thread-safe: one owner calls it.

    Whatever KV was computed stays in the prefix cache until its slots are needed: prompts after
    each chunk, answers when they end, are cancelled or preempted.
    """

    def __init__(
        self,
        runner: Runner,
        eos_token_ids: SequenceOf[int],
        options: EngineOptions | None = None,
        policy: SchedulerPolicy | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        step_cost: StepCost | None = None,
    ) -> None:
        """Serve ``runner``.

        Args:
            runner: the model and its KV cells.
            eos_token_ids: token ids that end an answer, unless the request says ``ignore_eos``.
            options: sizes.
            policy: the scheduler of all but drafts, which SmartSpec adds, and background prompts,
                which IdlePrefill adds; SarathiServe with the options' sizes when None.
            token_bytes: the bytes of a token, b"" for ids that stand for no text; None refuses
                requests with ``begins_with``.
            step_cost: what drafts are weighed by; None runs no drafts. Answers are the same with
                and without.
        """
        options = options or EngineOptions()
        self._runner = runner
        self._eos = frozenset(eos_token_ids)
        self._policy = IdlePrefill(
            SmartSpec(
                policy or SarathiServe(options.token_budget, options.max_running),
                options.token_budget,
            ),
            options.background_chunk,
            options.max_background,
        )
        self._vocabulary = Vocabulary(token_bytes, runner.config.vocab)
        context = runner.config.context
        self._context = min(context, options.context or context)
        self._longest = min(self._context, runner.slots)
        self._roster = Roster(runner.slots, options.max_running)
        self._speculation = (
            None if step_cost is None else Speculation(self._roster.sequences, step_cost)
        )
        self._undelivered: list[EngineOutput] = []
        self._next_id = 0
        self._counts = _Counts()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; its outputs come from ``step``.

        Raises:
            InvalidRequestError: it can never run, or its request_id is in flight already. Whether
                there are slots for a background prompt is seen when its turn comes.
        """
        longest = self._context if request.background else self._longest
        validate(request, self._runner.config.vocab, longest)
        if request.request_id in self._roster:
            raise InvalidRequestError(
                f"a request with id {request.request_id!r} is in flight already",
                param="request_id",
            )
        sequence = Sequence(request, self._next_id, longest, self._eos)
        sequence.constraint = self._vocabulary.constraint(request, sequence.ends)
        self._next_id += len(sequence.answers)
        self._roster.add(sequence)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers, now; its slots are free or evictable then.

        The next step delivers an output with finish reason "cancelled" for each unfinished
        answer. What is unknown is ignored: it may just have ended.
        """
        for sequence in self._roster.of(request_id):
            ended = [one for one in sequence.answers if index is None or one == index]
            if len(ended) == len(sequence.answers):
                self._undelivered += self._end(sequence, "cancelled")
            elif ended:
                self._undelivered += sequence.endings("cancelled", answers=ended)
                sequence.answers = tuple(one for one in sequence.answers if one not in ended)

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._roster or self._undelivered)

    def step(self) -> list[EngineOutput]:
        """Run one forward pass over whatever the policy chooses; returns what is new.

        A runner that raises ends the answers in that pass with finish reason "error"; the others
        go on.
        """
        started = time.perf_counter()
        outputs, self._undelivered = self._undelivered, []
        if self._roster:
            plan = self._policy.plan(self._roster.state(self._speculation))
            for sequence_id in plan.drop:
                outputs += self._end(self._roster.sequences[sequence_id], "cancelled")
            scheduled = self._carry_out(plan)
            if scheduled:
                outputs += self._run(scheduled)
        self._counts.busy_seconds += time.perf_counter() - started
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        counts, pool = self._counts, self._roster.pool
        drafts = DraftCounts() if self._speculation is None else self._speculation.counts
        return EngineStats(
            running=len(self._roster.running),
            waiting=len(self._roster.waiting),
            slots_total=pool.slots.total,
            slots_free=pool.slots.free_slots,
            slots_cached=pool.cache.evictable_tokens,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            computed_tokens=counts.computed_tokens,
            generated_tokens=counts.generated_tokens,
            preemptions=counts.preemptions,
            evicted_tokens=pool.cache.evicted_tokens,
            steps=counts.steps,
            busy_seconds=counts.busy_seconds,
            forward_seconds=counts.forward_seconds,
            sampling_seconds=counts.sampling_seconds,
            background=len(self._roster.background),
            background_tokens=counts.background_tokens,
            drafts=drafts.drafts,
            draft_tokens=drafts.tokens,
            accepted_tokens=drafts.accepted,
        )

    # --- carrying out a plan ---

    def _carry_out(self, plan: StepPlan) -> list[Scheduled]:
        """Preempt, admit and hand out slots; returns what runs."""
        sequences = self._roster.sequences
        for sequence_id in plan.preempt:
            self._counts.preemptions += 1
            self._roster.preempt(sequences[sequence_id])
        # Cached prefixes are locked before any slot is handed out, or it could evict them.
        admitted = [sequences[chunk.sequence_id] for chunk in plan.admit]
        for sequence in admitted:
            self._admit(sequence)
        for chunk in plan.background:
            self._roster.open(sequences[chunk.sequence_id])
        decoding = [sequences[sequence_id] for sequence_id in plan.decodes]
        slots = self._roster.pool.allocate(len(decoding)).tolist()
        for sequence, slot in zip(decoding, slots, strict=True):
            assert sequence.kv is not None
            sequence.kv.append(slot)
        for sequence in admitted:
            assert sequence.kv is not None
            sequence.kv.reserve(sequence.length - sequence.computed)
        scheduled = [Scheduled(sequence, 1, True) for sequence in decoding]
        for chunk in (*plan.chunks, *plan.admit, *plan.background):
            scheduled.append(self._prefill(sequences[chunk.sequence_id], chunk.tokens))
        for chunk in plan.drafts:
            sequence = sequences[chunk.sequence_id]
            assert sequence.kv is not None
            sequence.run_draft(chunk.tokens)
            sequence.kv.reserve(chunk.tokens)
        return scheduled

    def _admit(self, sequence: Sequence) -> None:
        new = sequence.cached_tokens is None
        self._roster.admit(sequence)
        if new:
            self._counts.prompt_tokens += sequence.prompt_length
            self._counts.cached_tokens += sequence.computed

    def _prefill(self, sequence: Sequence, tokens: int) -> Scheduled:
        missing = sequence.length - sequence.computed
        count = min(tokens, missing)
        if sequence.background and sequence.kv is not None:
            sequence.kv.reserve(count)
        return Scheduled(sequence, count, count == missing and not sequence.background)

    # --- one forward pass ---

    def _run(self, scheduled: list[Scheduled]) -> list[EngineOutput]:
        started = time.perf_counter()
        rows = sum(entry.rows for entry in scheduled)
        keys = sum(entry.rows * (entry.sequence.computed + entry.rows) for entry in scheduled)
        tried = {entry.sequence.sequence_id: entry.sequence.drafted for entry in scheduled}
        try:
            logits = self._runner.forward(pack(scheduled))
            computed = time.perf_counter()
            families = _families(scheduled)
            advance(logits, [one for family in families for one in family], self._vocabulary)
            sampled = time.perf_counter()
        except Exception as error:
            _log.exception("a forward pass over %d sequences failed", len(scheduled))
            return self._fail([entry.sequence for entry in scheduled], f"the model failed: {error}")
        self._counts.steps += 1
        self._counts.computed_tokens += rows
        self._counts.forward_seconds += computed - started
        self._counts.sampling_seconds += sampled - computed
        if self._speculation is not None:
            self._speculation.step_took(rows, keys / rows, sampled - started)
        outputs: list[EngineOutput] = []
        for entry in scheduled:
            outputs += self._note_computed(entry)
        for family in families:
            first = family[0]
            if self._speculation is not None:
                sequence = first.sequence
                self._speculation.advanced(sequence, tried[sequence.sequence_id], len(first.tokens))
            outputs += self._deliver(family)
        return outputs

    def _note_computed(self, entry: Scheduled) -> list[EngineOutput]:
        """Take note of computed prompt tokens, and let others use them; nobody was waiting for
        logits after them.
        """
        sequence = entry.sequence
        sequence.computed += entry.tokens
        if sequence.background:
            self._counts.background_tokens += entry.tokens
            finished = sequence.computed == sequence.length
            self._roster.release(sequence)
            return self._end(sequence, "stop") if finished else []
        if not entry.sampled and sequence.kv is not None:
            sequence.kv.keep(sequence.computed_tokens)
        return []

    def _deliver(self, family: list[Advance]) -> list[EngineOutput]:
        """Give answers their new tokens; a prompt's answers start to go their own ways here."""
        first = family[0].sequence
        assert first.kv is not None
        if any(one.failed for one in family):
            # Such KV would spoil whoever found it in the cache, so it is not kept.
            told = [family[0].output()] if len(family) == 1 and family[0].tokens else []
            return told + self._fail([first], "the model's logits hold no finite value")
        if not first.decoding:
            first.kv.keep(first.computed_tokens)
        if len(family) > 1:
            self._roster.start_siblings([one.sequence for one in family])
        return [self._close_step(one) for one in family]

    def _close_step(self, one: Advance) -> EngineOutput:
        """Give back what wrong drafts took, and end the answer if it has come to its end."""
        sequence = one.sequence
        sequence.decoding = True
        self._counts.generated_tokens += len(one.tokens)
        if sequence.kv is not None:
            sequence.computed = sequence.length - 1
            sequence.kv.truncate(sequence.computed)
        if one.finish_reason is not None:
            self._roster.retire(sequence)
        return one.output()

    def _fail(self, sequences: list[Sequence], error: str) -> list[EngineOutput]:
        """End sequences with an error; KV that others do not already share is lost."""
        outputs: list[EngineOutput] = []
        for sequence in sequences:
            outputs += sequence.endings("error", error)
            self._roster.retire(sequence, keep=False)
        return outputs

    def _end(self, sequence: Sequence, reason: FinishReason) -> list[EngineOutput]:
        """End all answers a sequence stands for; what it computed stays cached."""
        outputs = sequence.endings(reason)
        self._roster.retire(sequence)
        return outputs


@dataclass
class _Counts:
    """Counters since the engine's start; EngineStats tells what each means."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    forward_seconds: float = 0.0
    sampling_seconds: float = 0.0
    background_tokens: int = 0


def _families(scheduled: list[Scheduled]) -> list[list[Advance]]:
    """The answers that get tokens, those of one prompt together: they share a row of the logits."""
    families = []
    row = 0
    for entry in scheduled:
        if entry.sampled:
            families.append([Advance(answer, row) for answer in entry.sequence.part()])
            row += 1 + entry.sequence.drafted
    return families
