"""PageReader: a method of sparse decoding at work on one sequence.

Rows after the prompt choose pages at their positions' multiples of the method's interval, and the
first of them does in any case. Other rows use the choice of the last such row before them. So which
rows a step runs, drafts among them, changes nothing, and a preempted answer that is computed anew
makes the same choices.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.pool import KVPool
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.sequence_method import (
    Aspect,
    PlainLengths,
    RequestFacts,
    SequenceMethod,
    SequenceRows,
    SequenceView,
)
from midfill.methods.sparse_decode.method import SparseDecodeMethod
from midfill.methods.sparse_decode.summaries import SummaryTable
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.page_selection import PageSelection, reads_all

_KEPT_CHOICES = 16
"""Answers may lose their last tokens again; so far back they still know their choices."""


@dataclass
class DecodeReads:
    """Counts what rows that choose their keys read.

    Attributes:
        pairs: products of a query with a key, in all layers and query heads.
        causal: those that dense attention has for the same rows, in layers that see the whole text.
        rows: that read so.
        choices: that were made, each in all layers and heads.
        summaries: pages that were summarised, each in all layers and heads.
    """

    pairs: int = 0
    causal: int = 0
    rows: int = 0
    choices: int = 0
    summaries: int = 0


@dataclass(frozen=True)
class ReadingState:
    """What sequences under sparse decoding have in common.

    Attributes:
        config: the model.
        table: of summaries.
        reads: counts what is read.
    """

    config: ModelConfig
    table: SummaryTable
    reads: DecodeReads = field(default_factory=DecodeReads)

    @property
    def full_layers(self) -> int:
        """How many layers see the whole text."""
        config = self.config
        return sum(config.window_of(layer) is None for layer in range(config.layers))


class PageReader(SequenceMethod):
    """A sequence's choices, and the summaries of its pages.

    Args:
        name: how requests name the method.
        method: says how much is read.
        state: of all sequences.
        prompt: how many of the first tokens are computed exactly.
    """

    title = "the method of sparse decoding"
    changes = frozenset({Aspect.READS})

    def __init__(
        self, name: str, method: SparseDecodeMethod, state: ReadingState, prompt: int
    ) -> None:
        self.name = name
        self._method, self._state, self._prompt = method, state, prompt
        self._heads = method.choosing_heads(state.config)
        # A method may drop keys of heads that don't choose, but no other one may.
        keys = set() if isinstance(method, CompressionMethod) else {Aspect.KEYS}
        self.needs = frozenset({Aspect.ROWS, Aspect.POSITIONS} | keys)
        self._choices: dict[int, Int32Array] = {}
        self._entries: Int32Array = np.zeros(0, np.int32)
        self._pending: PageSelection | None = None

    # --- what the prefix cache gives and gets

    def cache_keys(self, tokens: Int32Array) -> Int32Array:
        """See ``SequenceMethod``: what comes after the prompt is not exact."""
        return tokens[: self._prompt]

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """See ``SequenceMethod``: what comes after the prompt is not exact."""
        return min(limit, self._prompt)

    # --- how it may run

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``: a step runs rows of the prompt, or rows that choose."""
        return self._prompt if sequence.computed < self._prompt else None

    # --- its rows in a step

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        """See ``SequenceMethod``."""
        if first < self._prompt:
            return rows
        self._find_summaries(sequence)
        self._pending = selection = self._select(first, end)
        return rows._replace(plan=replace(rows.plan or AttentionPlan(), selection=selection))

    def _select(self, first: int, end: int) -> PageSelection:
        """Return what the rows of the tokens first <= i < end choose."""
        config, rule = self._state.config, self._method.selection_rule
        points = [self._choice_point(position) for position in range(first, end)]
        if points[0] < first and points[0] not in self._choices:
            points = [max(point, first) for point in points]  # forgotten: the first row chooses
        made = sorted(set(points))
        shape = (len(made), config.layers, config.query_heads, rule.width)
        chosen = np.zeros(shape, np.int32)
        made_by, needed = np.full(len(made), -1, np.int32), 0
        for place, point in enumerate(made):
            given = self._given_choice(point)
            if point < first:
                chosen[place] = self._choices[point]
            elif given is not None:
                chosen[place] = given
            else:
                made_by[place] = point - first
                needed = rule.summaries(point + 1)
            self._choices[point] = chosen[place]  # which the step fills
        for point in list(self._choices)[:-_KEPT_CHOICES]:
            if point < points[0]:
                del self._choices[point]
        if needed > len(self._entries):
            created = self._state.table.create(needed - len(self._entries))
            self._entries = np.concatenate((self._entries, created))
        entries = self._entries[:needed]
        return PageSelection(
            rule=rule,
            heads=self._heads,
            of_row=np.searchsorted(made, points).astype(np.int32),
            made_by=made_by,
            chosen=chosen,
            entries=entries,
            missing=self._state.table.missing(entries),
            pairs=np.zeros((end - first, config.query_heads), np.int64),
        )

    def _given_choice(self, position: int) -> Int32Array | None:
        """Return a row's choice that needs no query; None where its query makes it."""
        choice, rule = self._method.page_choice, self._method.selection_rule
        if choice is None or reads_all(rule, position + 1):
            return None
        return choice(self._state.config, rule, position + 1)

    def _choice_point(self, position: int) -> int:
        """Return the position of the row whose choice a row uses."""
        interval = self._method.choice_interval
        return max(position // interval * interval, self._prompt)

    def _complete(self, keys: int) -> int:
        """Return how many summaries so many keys fill."""
        size = self._method.selection_rule.summary
        return keys // size if size else 0

    def _find_summaries(self, sequence: SequenceView) -> None:
        """Find the summaries of the prompt, by the slots of its pages' ends."""
        kv, count = sequence.kv, self._complete(self._prompt)
        if kv is None or len(self._entries) or not count:
            return
        table, size = self._state.table, self._method.selection_rule.summary
        if kv.prefix is None:
            ends = kv.slots[size - 1 : self._prompt : size]
            self._entries = table.find((size, self._heads.tobytes()), ends)
        else:
            self._entries = table.create(count)

    # --- what happens to it

    def committed(self, sequence: SequenceView) -> int:
        """See ``SequenceMethod``: what was computed of drafts may be wrong, and doesn't count."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pages = self._complete(sequence.computed)
            self._state.table.mark(self._entries[: min(len(pending.entries), pages)], written=True)
            self._count(pending, sequence.computed)
        return sequence.computed

    def _count(self, pending: PageSelection, computed: int) -> None:
        reads, config, rows = self._state.reads, self._state.config, len(pending.of_row)
        reads.pairs += int(pending.pairs.sum())
        reads.rows += rows
        reads.choices += int((pending.made_by >= 0).sum())
        reads.summaries += len(pending.missing)
        seen = rows * computed - rows * (rows - 1) // 2
        reads.causal += seen * config.query_heads * self._state.full_layers

    def decide(self, sequence: SequenceView) -> bool:
        """See ``SequenceMethod``: the prompt's slots are looked at before others are put there."""
        if sequence.computed >= self._prompt:
            self._find_summaries(sequence)
        return True

    def rolled_back(self, computed: int) -> None:
        """See ``SequenceMethod``."""
        for point in [point for point in self._choices if point >= computed]:
            del self._choices[point]
        pages = self._complete(max(computed, self._prompt))
        self._state.table.mark(self._entries[pages:], written=False)

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        self._state.table.release(self._entries)
        self._entries = self._entries[:0]
        self._choices = {}
        self._pending = None

    def fork(self) -> "PageReader":
        """See ``SequenceMethod``."""
        twin = PageReader(self.name, self._method, self._state, self._prompt)
        # Pages that come after the prompt's are written for each answer by itself.
        twin._entries = self._entries[: self._complete(self._prompt)].copy()
        twin._choices = dict(self._choices)
        self._state.table.share(twin._entries)
        return twin


class SparseDecodeKind(PlainLengths):
    """Puts methods of sparse decoding to work.

    Args:
        config: the model.
        pool: the KV cache's slots; their uses are counted once a request has such a method.

    Attributes:
        reads: what was read.
    """

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self._config, self._pool = config, pool
        self._state: ReadingState | None = None

    @property
    def reads(self) -> DecodeReads:
        """What was read by rows that chose their keys."""
        return DecodeReads() if self._state is None else self._state.reads

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        if not isinstance(method, SparseDecodeMethod):
            return None
        if self._state is None:
            self._state = ReadingState(self._config, SummaryTable(self._pool.slots))
        return PageReader(name, method, self._state, request.compress_after)
