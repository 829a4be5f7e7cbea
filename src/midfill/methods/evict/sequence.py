"""EvictedSequence: a method of compression at work on one sequence, as the engine asks it."""

from collections.abc import Sequence

import numpy as np

from midfill.arrays import Float32Array
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.evict.cascade import Cascade, CascadeSize, CascadingMethod
from midfill.methods.evict.eviction import Eviction
from midfill.methods.evict.method import CompressionMethod, RollingMethod
from midfill.methods.evict.state import LONGEST_CHECK, CompressionState
from midfill.methods.evict.succession import Succession
from midfill.methods.sequence_method import (
    Aspect,
    PlainLengths,
    Prefill,
    RequestFacts,
    SequenceMethod,
    SequenceRows,
    SequenceView,
)
from midfill.runners.forward.layer_rows import LayerRows, RowChanges
from midfill.runners.forward.runner import Runner

_NO_END = 2**31 - 1
"""Tokens of an answer that the context doesn't end. The KV cache does, since an answer that is
preempted is computed anew."""


class EvictedSequence(SequenceMethod):
    """Decides which keys stay, at points that depend on the request and its tokens alone.

    A step never crosses a point: neither a chunk nor a draft, and a preempted answer stops at the
    same points when it is computed anew.
    """

    title = "the method of compression"

    def __init__(
        self,
        name: str,
        eviction: Eviction,
        states: Sequence[CompressionState],
        cascade: Cascade | None,
        stage: int = 0,
    ) -> None:
        """Begin with a sequence of which nothing is computed.

        Args:
            name: how requests name the method.
            eviction: moves cells.
            states: the methods, and when they decide: each on what the one before it has kept.
                All but the last decide once.
            stage: which of them decides next.
            cascade: trims the prompt's KV while it is prefilled; None leaves it whole until then.
        """
        self.name = name
        self._eviction, self._states, self._cascade = eviction, tuple(states), cascade
        self._stage = stage
        self.changes = frozenset({Aspect.KEYS} | ({Aspect.CHUNKS} if cascade else set()))
        in_blocks = {Aspect.CHUNKS} if states[0].observes_blocks else set()
        self.needs = frozenset({Aspect.ROWS} | in_blocks)

    @property
    def is_private(self) -> bool:
        """See ``SequenceMethod``: KV that is trimmed meanwhile never exists as a whole."""
        return self._cascade is not None

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """See ``SequenceMethod``: observed rows run, and at least one before the first point."""
        limit = min(limit, self._state.first_observed, self._state.first_point - 1)
        if self._cascade is not None:
            limit = min(limit, self._cascade.exact_tokens(sequence.length))
        return limit

    def slots_needed(self, length: int) -> int | None:
        """See ``SequenceMethod``."""
        return None if self._cascade is None else self._cascade.slots_needed(length)

    def prefill(self, sequence: SequenceView) -> Prefill:
        """See ``SequenceMethod``."""
        if self._is_cascading(sequence.kv):
            return "layers"
        return "chunks" if self._state.observes_blocks else "any"

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``."""
        point = self._point(sequence)
        if point is None and self._state.decides_again:
            return sequence.length
        return point

    def row_changes(self, sequence: SequenceView, rows: LayerRows) -> RowChanges | None:
        """See ``SequenceMethod``."""
        if self._cascade is None or not self._is_cascading(sequence.kv):
            return None
        assert sequence.kv is not None
        self._cascade.begin(sequence.kv)
        return self._cascade

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        """See ``SequenceMethod``: positions may have begun anew."""
        prefix = None if sequence.kv is None else sequence.kv.prefix
        if prefix is None or not prefix.origin:
            return rows
        return rows._replace(positions=rows.positions - np.int32(prefix.origin))

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        """See ``SequenceMethod``."""
        return self._state.observed_rows(sequence.computed, tokens, drafted)

    def observe(self, first: int, queries: Float32Array) -> None:
        """See ``SequenceMethod``."""
        self._state.observe(first, self._eviction.full_layers.queries(queries))

    def decide(self, sequence: SequenceView) -> bool:
        """See ``SequenceMethod``."""
        kv, point = sequence.kv, sequence.computed
        if kv is None:
            return True
        self._eviction.show_blocks(self._state, kv, point)
        while point == self._point(sequence):
            if self._cascade is not None and self._is_cascading(kv):
                self._state.take()
                self._state.pass_point(point)
                self._cascade.finish(kv, self._eviction.pool)
            elif not self._eviction.evict(self._state, kv, point):
                return False
            if self._stage + 1 < len(self._states):
                self._stage += 1
        return True

    def rolled_back(self, computed: int) -> None:
        """See ``SequenceMethod``."""
        self._state.forget_after(computed)

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        for state in self._states:
            state.restart()
        self._stage = 0
        if self._cascade is not None:
            self._cascade.restart()

    def fork(self) -> "EvictedSequence":
        """See ``SequenceMethod``."""
        cascade = None if self._cascade is None else self._cascade.fork()
        states = [state.fork() for state in self._states]
        return EvictedSequence(self.name, self._eviction, states, cascade, self._stage)

    @property
    def _state(self) -> CompressionState:
        """The method that decides next."""
        return self._states[self._stage]

    def _is_cascading(self, kv: SequenceKV | None) -> bool:
        """Whether the prompt's KV is yet to be trimmed while it is prefilled."""
        return self._cascade is not None and (kv is None or kv.prefix is None)

    def _point(self, sequence: SequenceView) -> int | None:
        """Return the number of computed tokens at which it decides next; None if that's never.

        Until it is decided whether the answer is empty, its tokens may be taken back, so there is
        no point among them. Points are counted from the first token that the check didn't follow.
        """
        state = self._state
        if not state.decides_again:
            return None
        point = state.next_point
        if point <= sequence.prompt_length:
            return point
        if sequence.may_be_empty:
            return None
        follows_prompt = state.last_point <= sequence.prompt_length
        return point + (sequence.checked_tokens if follows_prompt else 0)


class EvictionKind(PlainLengths):
    """Puts methods of compression to work."""

    def __init__(self, runner: Runner, eviction: Eviction) -> None:
        self._runner = runner
        self._eviction = eviction

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        if isinstance(method, Succession):
            methods = [method.first, method.second]
        elif isinstance(method, CompressionMethod):
            methods = [method]
        else:
            return None
        prompt = request.compress_after
        config = self._eviction.full_layers.config
        tokens = sequence.tokens[:prompt].copy()
        states = [CompressionState(each, config, tokens, sequence.tenant) for each in methods]
        trims = _trimming(methods[0])
        cascade = None
        if trims is not None and trims.kept_tokens(prompt) is not None:
            cascade = Cascade(trims, self._runner, self._eviction.full_layers, prompt)
        return EvictedSequence(name, self._eviction, states, cascade)

    def max_length(self, methods: Sequence[object], request: RequestFacts, most: int) -> int:
        """See ``MethodKind.max_length``: answers over a cache that rolls on have no end."""
        config, rolling = self._runner.config, methods[0]
        if len(methods) > 1 or not isinstance(rolling, RollingMethod):
            return most
        if most < config.context or request.compress_after >= most:
            return most  # so the user says, or the prompt comes to its end before a decision
        if self._eviction.full_layers.is_part:
            return most
        held = rolling.held_tokens(request.compress_after, config)
        return most if held is None or held + LONGEST_CHECK > config.context else _NO_END

    def fitting_tokens(self, methods: Sequence[object], request: RequestFacts) -> int | None:
        """See ``MethodKind.fitting_tokens``."""
        size = self._size(methods)
        return (
            None if size is None else size.most_tokens(request.compress_after, self._runner.slots)
        )

    def longest_prompt(self, methods: Sequence[object], context: int) -> int | None:
        """See ``MethodKind.longest_prompt``."""
        size = self._size(methods)
        return None if size is None else size.longest_prompt(self._runner.slots, context) + 1

    def _size(self, methods: Sequence[object]) -> CascadeSize | None:
        for trims in filter(None, map(_trimming, methods)):
            return CascadeSize(trims, self._eviction.full_layers, self._runner)
        return None


def _trimming(method: object) -> CascadingMethod | None:
    """Return a method that trims prompts while they are prefilled; None if this doesn't."""
    return method if isinstance(method, CascadingMethod) and method.cascades else None
