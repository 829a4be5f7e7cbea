"""The scheduler's language: what a policy sees (ScheduleState) and what it decides (StepPlan).

A policy is a pure function from one to the other; the engine executes plans. Policies live in
``engine/policies``, one published method a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from midfill.kv.radix_cache import CachedPrefix


class RunningSequence(NamedTuple):
    """A sequence that holds slots.

    Attributes:
        sequence_id: its name; ids grow in order of arrival.
        length: its tokens, prompt and generated.
        computed: of these, the ones whose KV is there.
        decoding: whether its prompt is done: it has one token to run and needs one slot for it.
            Otherwise it is prefilling, and has had the slots of all its tokens since admission.
    """

    sequence_id: int
    length: int
    computed: int
    decoding: bool

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled."""
        return self.length - self.computed


class WaitingSequence(NamedTuple):
    """A sequence in a queue, new, preempted or in the background; it holds nothing.

    Attributes:
        sequence_id: its name; ids grow in order of arrival.
        length: its tokens; the prompt, and for a preempted one what it had generated.
    """

    sequence_id: int
    length: int


class CacheView(Protocol):
    """Questions about the KV cache; asking changes nothing."""

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        """What a queued sequence would find cached; its last token never counts, it must run."""
        ...

    def common_prefix(self, first: int, second: int) -> int:
        """How many leading tokens two sequences share; 0 for different tenants."""
        ...

    def released_by(self, victims: Sequence[int]) -> int:
        """Slots that preempting these running sequences together would make available."""
        ...


class DraftView(Protocol):
    """Guesses at the next tokens of sequences, and what a row costs."""

    def chances(self, sequence_id: int) -> Sequence[float]:
        """Estimated probabilities that the first, the first two, ... tokens drafted are all right.

        Of a sequence that this step would take past its last token; empty where nothing is drafted.
        """
        ...

    def seconds(self, rows: int, context: float) -> float:
        """Estimated time of a step of ``rows`` >= 1 rows that attend to so many tokens each."""
        ...


@dataclass(frozen=True)
class ScheduleState:
    """What a policy may look at.

    Attributes:
        running: sequences that hold slots, in order of arrival.
        waiting: the queue, its head first.
        available_slots: slots that are free or that the cache can give up.
        cache: questions about the cache.
        background: prompts to be cached when there is nothing better to do, oldest first.
        drafts: guesses at what comes next; None without speculation.
    """

    running: tuple[RunningSequence, ...]
    waiting: tuple[WaitingSequence, ...]
    available_slots: int
    cache: CacheView
    background: tuple[WaitingSequence, ...] = ()
    drafts: DraftView | None = None


class Chunk(NamedTuple):
    """``tokens`` next tokens of a sequence, of its prompt or of its draft."""

    sequence_id: int
    tokens: int


@dataclass(frozen=True)
class StepPlan:
    """One step's work, done in this order: drop, preempt, admit, then one forward pass.

    Attributes:
        preempt: running sequences to put back into the queue, each one to its front, in this
            order; what they had computed stays cached, evictable.
        decodes: decoding sequences that run their one token.
        chunks: prefilling sequences and how many tokens each runs.
        admit: waiting sequences to start, with their first chunk. Each gets the slots of all its
            tokens that are not cached.
        drop: background sequences to end without having finished.
        background: background sequences and how many uncached tokens each runs. Each gets the
            slots of these for this pass; then they are the cache's, and it holds nothing again.
        drafts: sequences whose last token runs in this step, and how many drafted tokens run after
            it. Each gets the slots of these, and gives back those of wrong ones.
    """

    preempt: tuple[int, ...] = ()
    decodes: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    admit: tuple[Chunk, ...] = ()
    drop: tuple[int, ...] = ()
    background: tuple[Chunk, ...] = ()
    drafts: tuple[Chunk, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens that go through the model."""
        return (
            len(self.decodes)
            + sum(chunk.tokens for chunk in self.chunks)
            + sum(chunk.tokens for chunk in self.admit)
            + sum(chunk.tokens for chunk in self.background)
            + sum(chunk.tokens for chunk in self.drafts)
        )


class SchedulerPolicy(Protocol):
    """Decides who runs how many tokens. Must be a pure function of the state."""

    def plan(self, state: ScheduleState) -> StepPlan:
        """Plan one step."""
        ...
