"""SarathiServe: never pause decodes; fill the token budget with decodes, then prefill chunks.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
OSDI 2024, arXiv 2403.02310, section 4.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from midfill.engine.scheduling.scheduler import (
    Chunk,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.engine.scheduling.step_cost import estimate_steps, max_rows_within

MAX_BUDGET = 2048
"""Maximum tokens per step where the time between tokens decides how many there are."""
_SMALLEST_CHUNK = 4
"""Tokens of prompts in a step where the decodes alone take as long as a gap may be."""
_SHORT_FACTOR = 4
"""A prompt leaves a part of the budget to others that have this many times fewer tokens to run."""
_MAX_CONSIDERED = 8
"""Waiting prompts that are looked at for that: each is looked up in the cache."""


@dataclass(frozen=True)
class SarathiServe:
    """Decode-first chunked prefill under a token budget; first come, first served.

    Every decoding sequence runs its token in every step, whatever the budget; prefills share what
    the decodes leave of it, the first to arrive before the others. Cached prompt tokens cost
    nothing. When decodes run out of slots, the latest arrivals are preempted and recomputed later.
    New sequences are admitted from the queue's head only, so none overtakes another.

    Attributes:
        token_budget: maximum tokens per step, fewer where ``ScheduleState.max_rows`` says so;
            exceeded only where the decodes alone exceed it, or one indivisible chunk, beside which
            no other prompt runs.
        max_running: maximum number of sequences that hold slots at a time.
        min_shared_prefix: a new sequence whose prompt shares at least this many uncached tokens
            with one that is being prefilled waits until they are cached instead of computing them
            again. An addition to the paper.
        short_share: share of the budget that a prompt leaves to later ones that have at most a
            quarter as many tokens to run: a keystroke then doesn't wait for somebody's long
            prompt. The longest of the shorter ones is left as large a share of the rest, so
            keystrokes don't keep it from running beside a much longer one. A prompt that all later
            ones are short beside takes at most 1 / (1 - short_share) times as long as in their
            absence, and so does one that waits for it. Another addition; 0 is the paper's order.
        min_shared_rest: the same for a prompt of which nothing but the last token would be left.
            Some editors send each request several times at once.
        gap: seconds; above 0, the longest time that a step with prompts should take, and so the
            longest gap between two tokens of a running answer. The budget is then what fits by the
            measured costs of steps, at most ``MAX_BUDGET``; ``token_budget`` is that of the first
            steps, and ``ScheduleState.max_rows`` bounds nothing. Where the decodes alone take
            longer, prompts still have a few rows.
    """

    token_budget: int = 128
    max_running: int = 128
    short_share: float = 0.0
    min_shared_prefix: int = 32
    min_shared_rest: int = 4
    gap: float = 0.0

    fixed_options: ClassVar[frozenset[str]] = frozenset()
    """Fields that a subclass has no use for: no option of it sets them."""

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_running < 1:
            raise ValueError("token_budget and max_running must be at least 1")
        if not 0 <= self.short_share < 1:
            raise ValueError("short_share must be at least 0 and below 1")
        if not 0 <= self.gap < inf:
            raise ValueError("gap must be a number of seconds, at least 0")

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step: decodes, then prompts already started, then new ones."""
        if self.gap:
            return self._within_gap(state).plan(replace(state, max_rows=None))
        decodes, victims, available = self.place_decodes(state)
        rows = len(decodes)
        chunks: list[Chunk] = []
        started = [
            sequence
            for sequence in state.running
            if not sequence.decoding and sequence.sequence_id not in victims
        ]
        prefilling = [sequence.sequence_id for sequence in started]
        queue = [] if victims else self._queued(state, prefilling)
        later = [sequence.remaining for sequence in started] + queue
        for place, sequence in enumerate(started):
            left = self._left_to_short(state, sequence.remaining, later[place + 1 :], len(decodes))
            tokens = self._chunk(state, sequence.computed, sequence.remaining, rows + left)
            if sequence.atomic_tokens:
                tokens = self._whole(state, sequence.atomic_tokens, rows, len(decodes))
            if tokens:
                chunks.append(Chunk(sequence.sequence_id, tokens))
                rows += tokens
        # After a preemption the queue's head is a victim. It can't fit: the missing slots were
        # taken from it.
        admit = []
        if not victims:
            admit = self.admit(state, prefilling, rows, available, len(decodes), queue)
        return StepPlan(tuple(victims), tuple(decodes), tuple(chunks), tuple(admit))

    def _within_gap(self, state: ScheduleState) -> "SarathiServe":
        """Return the same policy with the budget that keeps the gap."""
        estimate = estimate_steps(state)
        budget = self.token_budget
        if estimate is not None:
            smallest = estimate.decodes + _SMALLEST_CHUNK
            budget = max_rows_within(self.gap, estimate, MAX_BUDGET, smallest)
        return replace(self, token_budget=budget, gap=0.0)

    def place_decodes(self, state: ScheduleState) -> tuple[list[int], list[int], int]:
        """Assign a slot to every decoding sequence; preempt the latest arrivals where none is left.

        Returns:
            (decodes, victims, available): the sequences that decode, the preempted ones (latest
            arrival first), and the number of slots left.
        """
        remaining = list(state.running)
        decodes: list[int] = []
        victims: list[int] = []
        available = state.available_slots
        position = 0
        while position < len(remaining):
            sequence = remaining[position]
            if not sequence.decoding:
                position += 1
                continue
            while available < 1 and len(remaining) > position:
                victims.append(remaining.pop().sequence_id)
                released = state.cache.released_by(victims)
                available = state.available_slots + released - len(decodes)
            if len(remaining) > position:
                decodes.append(sequence.sequence_id)
                available -= 1
                position += 1
        return decodes, victims, available

    def admit(
        self,
        state: ScheduleState,
        prefilling: Iterable[int],
        rows: int,
        available: int,
        decodes: int,
        queue: Sequence[int] = (),
    ) -> list[Chunk]:
        """Return the sequences to start, from the queue's head, while slots and budget last.

        Args:
            state: the state.
            prefilling: sequences that prefill already.
            rows: that the step has so far.
            available: slots that are left.
            decodes: how many of the rows are decodes.
            queue: tokens to run of the first waiting prompts, which may be left some by those
                before them.
        """
        admitted: list[Chunk] = []
        in_prefill = list(prefilling)
        places = self.max_running - len(state.running)
        for place, sequence in enumerate(state.waiting[: max(places, 0)]):
            if rows >= self._budget(state):
                break
            cached = state.cache.cached_prefix(sequence.sequence_id)
            available -= sequence.needs(cached)
            remaining = sequence.length - cached.tokens
            left = self._left_to_short(state, remaining, queue[place + 1 :], decodes)
            tokens = self._chunk(state, cached.tokens, remaining, rows + left)
            if left and not tokens:
                tokens = 1  # admitted, it no longer keeps the others waiting
            if sequence.atomic_tokens:
                tokens = self._whole(state, sequence.atomic_tokens, rows, decodes)
            if available < 0 or not tokens:
                break
            if self.should_wait(state, sequence, cached.tokens, in_prefill):
                break
            admitted.append(Chunk(sequence.sequence_id, tokens))
            in_prefill.append(sequence.sequence_id)
            rows += tokens
        return admitted

    def should_wait(
        self, state: ScheduleState, sequence: WaitingSequence, cached: int, in_prefill: list[int]
    ) -> bool:
        """Whether a prompt in prefill is about to cache a long part of this one, or its rest."""
        for other in in_prefill:
            common = state.cache.common_prefix(sequence.sequence_id, other)
            is_rest = common == sequence.length - 1
            if common - cached >= (self.min_shared_rest if is_rest else self.min_shared_prefix):
                return True
        return False

    def _queued(self, state: ScheduleState, prefilling: list[int]) -> list[int]:
        """Return how many tokens the first waiting prompts have to run, 0 for those that wait."""
        if not self.short_share:
            return []
        tokens = []
        for sequence in state.waiting[:_MAX_CONSIDERED]:
            cached = state.cache.cached_prefix(sequence.sequence_id).tokens
            waits = self.should_wait(state, sequence, cached, prefilling)
            tokens.append(0 if waits else sequence.length - cached)
        return tokens

    def _left_to_short(
        self, state: ScheduleState, remaining: int, later: Sequence[int], decodes: int
    ) -> int:
        """Return how many rows a prompt leaves to much shorter ones that come later.

        Args:
            state: the state.
            remaining: tokens that the prompt has to run.
            later: tokens that the others have to run, 0 for those that wait.
            decodes: rows of the step that are decodes.
        """
        if not self.short_share:
            return 0
        shorter = [tokens for tokens in later if 0 < tokens * _SHORT_FACTOR <= remaining]
        if not shorter:
            return 0
        # Those that the longest of them has to leave rows to come first, however many there are.
        shortest = self._left_to_short(state, max(shorter), shorter, decodes)
        rows = max(self._budget(state) - decodes, 0) - shortest
        return shortest + min(sum(shorter) - shortest, int(self.short_share * rows))

    def _chunk(self, state: ScheduleState, computed: int, remaining: int, rows: int) -> int:
        """Return how many tokens a prompt may run beside ``rows`` others.

        Decodes alone may exceed the budget.

        Args:
            state: the state.
            computed: tokens of the prompt that are computed or cached.
            remaining: tokens that it has to run.
            rows: of the others.
        """
        return max(min(remaining, self._budget(state) - rows), 0)

    def _whole(self, state: ScheduleState, tokens: int, rows: int, decodes: int) -> int:
        """Return ``tokens`` if an indivisible chunk of so many may run beside ``rows``, or 0.

        A larger one than the budget runs where all others are decodes.
        """
        return tokens if rows == decodes or rows + tokens <= self._budget(state) else 0

    def _budget(self, state: ScheduleState) -> int:
        budget, limit = self.token_budget, state.max_rows
        return budget if limit is None else min(budget, limit)
