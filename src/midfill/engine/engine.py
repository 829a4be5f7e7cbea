"""Engine: the step loop. It owns the queue, the running set and who holds which KV slot."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from midfill.engine.cache_view import EngineCacheView
from midfill.engine.packing import pack
from midfill.engine.policies.idle_prefill import IdlePrefill
from midfill.engine.policies.sarathi_serve import SarathiServe
from midfill.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
)
from midfill.engine.runner import Runner
from midfill.engine.sampler import SampledToken, SampleRow, is_greedy, sample
from midfill.engine.scheduler import (
    RunningSequence,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.engine.sequence import Sequence
from midfill.engine.validation import validate
from midfill.engine.vocabulary import Vocabulary
from midfill.errors import InvalidRequestError
from midfill.kv.pool import KVPool
from midfill.kv.sequence_kv import SequenceKV

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
    ) -> None:
        """Serve ``runner``.

        Args:
            runner: the model and its KV cells.
            eos_token_ids: token ids that end an answer, unless the request says ``ignore_eos``.
            options: sizes.
            policy: the scheduler of all but background prompts, which IdlePrefill adds;
                SarathiServe with the options' sizes when None.
            token_bytes: the bytes of a token, b"" for ids that stand for no text; None refuses
                requests with ``begins_with``.
        """
        options = options or EngineOptions()
        self._runner = runner
        self._eos = frozenset(eos_token_ids)
        self._policy = IdlePrefill(
            policy or SarathiServe(options.token_budget, options.max_running),
            options.background_chunk,
            options.max_background,
        )
        self._vocabulary = Vocabulary(token_bytes, runner.config.vocab)
        self._max_running = options.max_running
        context = runner.config.context
        self._context = min(context, options.context or context)
        self._longest = min(self._context, runner.slots)
        self._pool = KVPool(runner.slots)
        self._sequences: dict[int, Sequence] = {}
        self._cache_view = EngineCacheView(self._pool, self._sequences)
        self._requests: dict[str, set[int]] = {}
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._background: deque[Sequence] = deque()
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
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"a request with id {request.request_id!r} is in flight already",
                param="request_id",
            )
        sequence = Sequence(request, self._next_id, longest)
        sequence.constraint = self._vocabulary.constraint(request, self._eos)
        self._next_id += sequence.answers
        self._sequences[sequence.sequence_id] = sequence
        self._requests[sequence.request_id] = {sequence.sequence_id}
        (self._background if request.background else self._waiting).append(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request now; its slots are free or evictable when this returns.

        The next step delivers an output with finish reason "cancelled" for each unfinished
        answer. An unknown id is ignored: the request may just have ended.
        """
        for sequence_id in sorted(self._requests.get(request_id, ())):
            self._undelivered += self._end(self._sequences[sequence_id], "cancelled")

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._running or self._waiting or self._background or self._undelivered)

    def step(self) -> list[EngineOutput]:
        """Run one forward pass over whatever the policy chooses; returns what is new.

        A runner that raises ends the answers in that pass with finish reason "error"; the others
        go on.
        """
        started = time.perf_counter()
        outputs, self._undelivered = self._undelivered, []
        if self._running or self._waiting or self._background:
            plan = self._policy.plan(self._state())
            for sequence_id in plan.drop:
                outputs += self._end(self._sequences[sequence_id], "cancelled")
            scheduled = self._carry_out(plan)
            if scheduled:
                outputs += self._run(scheduled)
        self._counts.busy_seconds += time.perf_counter() - started
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        counts = self._counts
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            slots_total=self._pool.slots.total,
            slots_free=self._pool.slots.free_slots,
            slots_cached=self._pool.cache.evictable_tokens,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            computed_tokens=counts.computed_tokens,
            generated_tokens=counts.generated_tokens,
            preemptions=counts.preemptions,
            evicted_tokens=self._pool.cache.evicted_tokens,
            steps=counts.steps,
            busy_seconds=counts.busy_seconds,
            background=len(self._background),
            background_tokens=counts.background_tokens,
        )

    def _state(self) -> ScheduleState:
        return ScheduleState(
            running=tuple(
                RunningSequence(
                    sequence.sequence_id, sequence.length, sequence.computed, sequence.decoding
                )
                for sequence in self._running
            ),
            waiting=_queued(self._waiting),
            available_slots=self._pool.available,
            cache=self._cache_view,
            background=_queued(self._background),
        )

    # --- carrying out a plan ---

    def _carry_out(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Preempt, admit and hand out slots; returns what runs, with each one's token count."""
        for sequence_id in plan.preempt:
            self._preempt(self._sequences[sequence_id])
        # Cached prefixes are locked before any slot is handed out, or it could evict them.
        admitted = [self._admit(self._sequences[chunk.sequence_id]) for chunk in plan.admit]
        for chunk in plan.background:
            self._open(self._sequences[chunk.sequence_id])
        decoding = [self._sequences[sequence_id] for sequence_id in plan.decodes]
        slots = self._pool.allocate(len(decoding)).tolist()
        for sequence, slot in zip(decoding, slots, strict=True):
            assert sequence.kv is not None
            sequence.kv.append(slot)
        for sequence in admitted:
            assert sequence.kv is not None
            sequence.kv.reserve(sequence.length - sequence.computed)
        scheduled = [(sequence, 1) for sequence in decoding]
        for chunk in (*plan.chunks, *plan.admit, *plan.background):
            sequence = self._sequences[chunk.sequence_id]
            count = min(chunk.tokens, sequence.length - sequence.computed)
            if sequence.background and sequence.kv is not None:
                sequence.kv.reserve(count)
            scheduled.append((sequence, count))
        return scheduled

    def _admit(self, sequence: Sequence) -> Sequence:
        """Move a waiting sequence into the running set with what the cache holds of it."""
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._running.sort(key=_arrival)
        sequence.decoding = False
        new = sequence.cached_tokens is None
        self._open(sequence)
        if new:
            self._counts.prompt_tokens += sequence.prompt_length
            self._counts.cached_tokens += sequence.computed
        return sequence

    def _open(self, sequence: Sequence) -> None:
        """Let a sequence hold what the cache has of it."""
        sequence.kv = SequenceKV(self._pool, sequence.tenant, sequence.limit)
        # The last token has to run even if it is cached: its logits are what is wanted. (Not so
        # in the background, where a row more costs nobody anything.)
        sequence.computed = sequence.kv.open(sequence.tokens[:-1])
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to the front of the queue; what it computed stays cached."""
        self._counts.preemptions += 1
        self._running.remove(sequence)
        self._release(sequence)
        self._waiting.appendleft(sequence)

    def _release(self, sequence: Sequence, keep: bool = True) -> None:
        """Let go of a sequence's slots."""
        if sequence.kv is not None:
            if keep:
                sequence.kv.close(sequence.computed_tokens)
            else:
                sequence.kv.drop()
        sequence.kv = None
        sequence.computed = 0

    def _retire(self, sequence: Sequence, keep: bool = True) -> None:
        """Forget a sequence that has ended, wherever it is."""
        if sequence.background:
            self._background.remove(sequence)
        elif sequence.kv is not None:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence, keep)
        del self._sequences[sequence.sequence_id]
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence.sequence_id)
        if not siblings:
            del self._requests[sequence.request_id]

    # --- one forward pass ---

    def _run(self, scheduled: list[tuple[Sequence, int]]) -> list[EngineOutput]:
        finishing = [
            sequence
            for sequence, count in scheduled
            if sequence.computed + count == sequence.length and not sequence.background
        ]
        try:
            logits = self._runner.forward(pack(scheduled))
            families = [sequence.part() for sequence in finishing]
            tokens = iter(self._sample(logits, families))
        except Exception as error:
            _log.exception("a forward pass over %d sequences failed", len(scheduled))
            return self._fail([sequence for sequence, _ in scheduled], f"the model failed: {error}")
        self._counts.steps += 1
        self._counts.computed_tokens += sum(count for _, count in scheduled)
        outputs: list[EngineOutput] = []
        for sequence, count in scheduled:
            sequence.computed += count
            if sequence.background:
                self._counts.background_tokens += count
                outputs += self._lay_down(sequence)
            elif sequence.computed < sequence.length:
                self._keep_prompt(sequence)
        for siblings in families:
            chosen = [next(tokens) for _ in siblings]
            outputs += self._advance(siblings, chosen)
        return outputs

    def _sample(
        self, logits: torch.Tensor, families: list[list[Sequence]]
    ) -> list[SampledToken | None]:
        """Choose a token for every answer; answers of one family share a row of the logits."""
        rows: list[SampleRow] = []
        for row, siblings in enumerate(families):
            allowed = siblings[0].allowed()  # the others are at the same place
            for answer in siblings:
                draw = 0.0 if is_greedy(answer.params) else answer.draw()
                rows.append(
                    SampleRow(
                        row, answer.params, answer.tokens, answer.prompt_length, draw, allowed
                    )
                )
        return sample(logits, rows)

    def _lay_down(self, sequence: Sequence) -> list[EngineOutput]:
        """Leave a background prompt's chunk to the cache, and end it if that was the last one."""
        finished = sequence.computed == sequence.length
        self._release(sequence)
        return self._end(sequence, "stop") if finished else []

    def _keep_prompt(self, sequence: Sequence) -> None:
        """Let others use the part of a prompt that is computed."""
        if not sequence.decoding and sequence.kv is not None:
            sequence.kv.keep(sequence.computed_tokens)

    def _advance(
        self, siblings: list[Sequence], tokens: list[SampledToken | None]
    ) -> list[EngineOutput]:
        """Give each answer its new token; a prompt's answers start to go their own ways here."""
        first = siblings[0]
        chosen = [token for token in tokens if token is not None]
        if len(chosen) < len(tokens):
            # Such KV would spoil whoever found it in the cache, so it is not kept.
            return self._fail([first], "the model's logits hold no finite value")
        self._keep_prompt(first)
        if len(siblings) > 1:
            self._start_siblings(siblings)
        return [self._append(*pair) for pair in zip(siblings, chosen, strict=True)]

    def _start_siblings(self, siblings: list[Sequence]) -> None:
        """Start a request's other answers on the first one's KV; those without a place queue."""
        first, *others = siblings
        assert first.kv is not None
        first.answers = 1
        places = max(self._max_running - len(self._running), 0)
        for other in others:
            self._sequences[other.sequence_id] = other
            self._requests[other.request_id].add(other.sequence_id)
        for other in others[:places]:
            other.kv = first.kv.fork()
            other.computed = first.computed
            self._running.append(other)
        self._running.sort(key=_arrival)
        self._waiting.extendleft(reversed(others[places:]))

    def _append(self, sequence: Sequence, token: SampledToken) -> EngineOutput:
        """Append a sampled token and end the answer if it is the last one."""
        sequence.append(token.token_id)
        if sequence.constraint is not None:
            sequence.constraint = self._vocabulary.advance(sequence.constraint, token.token_id)
        sequence.decoding = True
        self._counts.generated_tokens += 1
        reason = self._finish_reason(sequence, token.token_id)
        if reason is not None:
            self._retire(sequence)
        return EngineOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[token.token_id],
            logprobs=None if token.logprobs is None else [token.logprobs],
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens or 0,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.params
        if token_id in params.stop_token_ids:
            return "stop"
        if token_id in self._eos and not params.ignore_eos:
            return "stop"
        return "length" if sequence.length >= sequence.limit else None

    def _fail(self, sequences: list[Sequence], error: str) -> list[EngineOutput]:
        """End sequences with an error; KV that others do not already share is lost."""
        outputs: list[EngineOutput] = []
        for sequence in sequences:
            outputs += sequence.endings("error", error)
            self._retire(sequence, keep=False)
        return outputs

    def _end(self, sequence: Sequence, reason: FinishReason) -> list[EngineOutput]:
        """End all answers a sequence stands for; what it computed stays cached."""
        outputs = sequence.endings(reason)
        self._retire(sequence)
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
    background_tokens: int = 0


def _arrival(sequence: Sequence) -> int:
    return sequence.sequence_id


def _queued(sequences: Iterable[Sequence]) -> tuple[WaitingSequence, ...]:
    return tuple(WaitingSequence(sequence.sequence_id, sequence.length) for sequence in sequences)
