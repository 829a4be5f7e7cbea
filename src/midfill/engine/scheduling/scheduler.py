"""The language of scheduling: what policies see (ScheduleState) and what they decide (StepPlan).

A policy is a pure function; the engine applies plans. Policies live in ``policies``, one
published method per file, are found by name through ``registry.py``, and are put together in
``engine/loading.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple, Protocol

from midfill.kv.radix_cache import CachedPrefix


class ProgramId(NamedTuple):
    """Names a program: several requests, one after the other, of which each continues the last.

    Attributes:
        tenant: whose it is.
        name: what the tenant calls it.
    """

    tenant: str
    name: str


class Hints(NamedTuple):
    """What a client says of its request. Wrong hints cost speed, never correctness.

    Attributes:
        priority: lower values run first, as in vLLM.
        deadline: when the client gives up, on the clock of ``ScheduleState.now``; infinity is
            never.
        expected_tokens: how many tokens the answer will probably have, at least 1 and at most what
            the request allows; None if nobody knows.
        program: the program that the request belongs to; None if it belongs to none.
        program_arrived: when the program's first request arrived; the request's own arrival where
            it has no program.
        last_step: whether it is the program's last request.
        offline: whether nobody waits for it, see ``policies.online_first``.
    """

    priority: int = 0
    deadline: float = inf
    expected_tokens: int | None = None
    program: ProgramId | None = None
    program_arrived: float = 0.0
    last_step: bool = False
    offline: bool = False


NO_HINTS = Hints()


class RunningSequence(NamedTuple):
    """A sequence that holds slots.

    Attributes:
        sequence_id: ids grow in order of arrival.
        length: number of its tokens, prompt and generated.
        computed: how many of them have their KV computed.
        decoding: whether its prompt is computed. Then it has one token to run and needs one slot
            for it. Otherwise it is prefilling and has held slots for all its tokens since
            admission.
        by_layers: whether its prompt is prefilled by layers; it was admitted so.
        whole: whether all of its tokens then have to run in one pass.
        layer_tokens: how many tokens are on their way through the layers.
        next_layer: how many layers these have gone through.
        atomic_tokens: how many tokens it runs next in one step or not at all; 0: any number.
        arrived: when its request arrived, on the clock of ``ScheduleState.now``.
        hints: what its client says of it.
    """

    sequence_id: int
    length: int
    computed: int
    decoding: bool
    by_layers: bool = False
    whole: bool = False
    layer_tokens: int = 0
    next_layer: int = 0
    atomic_tokens: int = 0
    arrived: float = 0.0
    hints: Hints = NO_HINTS

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled."""
        return self.length - self.computed


class WaitingSequence(NamedTuple):
    """A queued sequence: new, preempted or background. It holds no slots.

    Attributes:
        sequence_id: ids grow in order of arrival.
        length: number of its tokens: the prompt and, if it was preempted, what it had generated.
        prefill: how its tokens may be computed: all of them in one pass, layer by layer ("layers"),
            in chunks only ("chunks"), or as the policy likes ("any").
        atomic_tokens: how many tokens after its cached prefix run in one step or not at all; 0: any
            number.
        slots: how many it takes at its admission; None is one for each token that is not cached.
        tenant: whose it is. Tenants take turns, which no policy changes.
        arrived: when its request arrived, on the clock of ``ScheduleState.now``.
        resumed: whether it has run before, and was preempted.
        hints: what its client says of it.
    """

    sequence_id: int
    length: int
    prefill: Literal["any", "layers", "chunks"] = "any"
    atomic_tokens: int = 0
    slots: int | None = None
    tenant: str = ""
    arrived: float = 0.0
    resumed: bool = False
    hints: Hints = NO_HINTS

    def needs(self, cached: CachedPrefix) -> int:
        """Return how many of the available slots its admission takes.

        Args:
            cached: what it finds in the cache; this is locked then, and no longer available.
        """
        own = self.length - cached.tokens if self.slots is None else self.slots
        return cached.evictable + own


class CacheView(Protocol):
    """Questions about the KV cache; asking changes nothing."""

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        """Return what a queued sequence would find cached of what it may take from the cache.

        Its last token must run, and so must those whose logits score its prompt.
        """

    def found_elsewhere(self, sequence_id: int) -> int:
        """Estimate how many more tokens of a queued sequence have KV that its method can use.

        It stands in other places of the cache, and is looked up once.
        """

    def common_prefix(self, first: int, second: int) -> int:
        """Return how many leading tokens of ``second`` a queued sequence could take over.

        0 for different tenants; its last token never counts.
        """

    def released_by(self, victims: Sequence[int]) -> int:
        """Return how many slots preempting these running sequences would make available."""


class Pin(NamedTuple):
    """The KV of a program whose next request has not arrived: it is locked until its deadline.

    Attributes:
        program: the program.
        deadline: when the lock is due to be released, on the clock of ``ScheduleState.now``.
        program_arrived: when the program's first request arrived.
        slots: how many slots would become available if this pin alone were released.
        awaited: whether it is due, and kept since the program's next request is in the queue.
    """

    program: ProgramId
    deadline: float
    program_arrived: float
    slots: int
    awaited: bool = False


@dataclass(frozen=True)
class ScheduleState:
    """What a policy may look at.

    Attributes:
        running: sequences that hold slots, in order of arrival.
        waiting: the queue, head first.
        available_slots: slots that are free or evictable.
        cache: questions about the cache.
        background: prompts to be cached when the engine is idle, oldest first.
        max_rows: how many rows a step with prompts may have, so that a request that arrives
            meanwhile doesn't wait long; None where steps are not known to be slow.
        now: the time in seconds, on a clock that never runs backwards.
        total_slots: size of the KV pool in slots.
        step_seconds: estimates the seconds of a step from its rows and the tokens that a row
            attends to, on average; learned from the engine's own steps. None before there are any.
        prefill_share: what the last plan gave prompts, see ``StepPlan``.
        pins: KV that is locked for programs whose next request is awaited.
    """

    running: tuple[RunningSequence, ...]
    waiting: tuple[WaitingSequence, ...]
    available_slots: int
    cache: CacheView
    background: tuple[WaitingSequence, ...] = ()
    max_rows: int | None = None
    now: float = 0.0
    total_slots: int = 0
    step_seconds: Callable[[int, float], float] | None = None
    prefill_share: int | None = None
    pins: tuple[Pin, ...] = ()

    @property
    def used_slots(self) -> int:
        """Slots that sequences or pins hold: neither free nor evictable."""
        return self.total_slots - self.available_slots

    @cached_property
    def pinned_programs(self) -> frozenset[ProgramId]:
        """The programs that have pins."""
        return frozenset(pin.program for pin in self.pins)


class Chunk(NamedTuple):
    """The next ``tokens`` tokens of a sequence: of its prompt or of its draft."""

    sequence_id: int
    tokens: int


class LayerChunk(NamedTuple):
    """The next ``tokens`` tokens of a sequence in layers first <= i < end.

    The first chunk of these tokens begins with layer 0, each later one where the one before ended;
    they count as computed after the last layer.
    """

    sequence_id: int
    tokens: int
    first: int
    end: int


@dataclass(frozen=True)
class StepPlan:
    """The work of one step, done in this order: drop, preempt, admit, then one forward pass.

    Attributes:
        preempt: running sequences that go back to the head of the queue, in this order. What they
            have computed stays cached, evictable.
        decodes: decoding sequences that run their one token.
        chunks: prefilling sequences and how many tokens each runs.
        admit: waiting sequences to start, with the tokens of their first chunk. Each is given
            slots for all its tokens that are not cached. With 0 tokens, it prefills by layers.
        layer_chunks: sequences that prefill by layers, some of ``admit`` among them.
        too_large: those of ``admit`` that prefill in chunks only because slots are too few for a
            prefill by layers beside the decodes.
        drop: background sequences to end unfinished.
        background: background sequences and how many uncached tokens each runs. Each holds slots
            for these during the pass; afterwards they belong to the cache.
        drafts: sequences whose last token runs in this step, and how many drafted tokens run after
            it. Each is given slots for these; those of rejected tokens are freed after the pass.
        prefill_share: how much of a step the policy gives prompts, in percent; the next state has
            it. None where the policy divides nothing.
    """

    preempt: tuple[int, ...] = ()
    decodes: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    admit: tuple[Chunk, ...] = ()
    drop: tuple[int, ...] = ()
    background: tuple[Chunk, ...] = ()
    drafts: tuple[Chunk, ...] = ()
    layer_chunks: tuple[LayerChunk, ...] = ()
    too_large: tuple[int, ...] = ()
    prefill_share: int | None = None

    @property
    def rows(self) -> int:
        """Tokens that go through the model, through all of its layers or some."""
        return (
            len(self.decodes)
            + sum(chunk.tokens for chunk in self.chunks)
            + sum(chunk.tokens for chunk in self.admit)
            + sum(chunk.tokens for chunk in self.background)
            + sum(chunk.tokens for chunk in self.drafts)
            + sum(chunk.tokens for chunk in self.layer_chunks)
        )


def sampled_sequences(state: ScheduleState, plan: StepPlan) -> Iterator[int]:
    """Yield the sequences whose last token runs in ``plan``, so that a next one is sampled.

    Those that prefill by layers are left out: no draft runs with them.
    """
    yield from plan.decodes
    if plan.chunks:
        remaining = {sequence.sequence_id: sequence.remaining for sequence in state.running}
        for chunk in plan.chunks:
            if chunk.tokens == remaining[chunk.sequence_id]:
                yield chunk.sequence_id
    if plan.admit:
        lengths = {sequence.sequence_id: sequence.length for sequence in state.waiting}
        for chunk in plan.admit:
            cached = state.cache.cached_prefix(chunk.sequence_id).tokens
            if chunk.tokens == lengths[chunk.sequence_id] - cached:
                yield chunk.sequence_id


class SchedulerPolicy(Protocol):
    """Decides which sequences run how many tokens."""

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step; a pure function."""
