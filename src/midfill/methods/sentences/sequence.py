"""SentenceReader: a method that looks sentences up, at work on one sequence.

Once the prompt is computed, what is retained of it moves out of the KV pool. Rows after it run one
by one. Before each, the sentences for it are chosen, by the queries of the rows before it and by
its token, and fetched. The row attends to them as it would to any compressed sequence's cells. KV
of the answer moves out of the pool now and then, which no row notices: keys are known by their
numbers, wherever they are. So load and preemption change nothing.
"""

from dataclasses import dataclass, replace

import numpy as np

from midfill.arrays import BoolArray, Float32Array, Int32Array
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.pool import KVPool
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.sentences.method import ChosenSentences
from midfill.methods.sentences.parked import ParkedKeys
from midfill.methods.sentences.selection import (
    chosen_keys,
    mean_keys,
    retained_keys,
    sentence_bounds,
    similarities,
)
from midfill.methods.sequence_method import (
    Aspect,
    PlainLengths,
    RequestFacts,
    SequenceMethod,
    SequenceRows,
    SequenceView,
)
from midfill.methods.sparse_decode.sequence import DecodeReads
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.runner import Runner

_PARKED_TOKENS = 32
"""So many tokens of an answer move out of the pool together."""


@dataclass
class SentenceReads(DecodeReads):
    """What ``DecodeReads`` counts, and what was moved.

    Attributes:
        listed: keys that rows read of those outside the pool, each in one layer and KV head.
        fetched: how many of them had to be copied into the pool, since the row before had not read
            them.
        parked_bytes: the most that one sequence has kept outside the pool, until that is taken.
    """

    listed: int = 0
    fetched: int = 0
    parked_bytes: int = 0


@dataclass(frozen=True)
class _Progress:
    """What is known of the sentence being written, before a row.

    Attributes:
        queries, keys: float32 [heads, head_dim], sums over its rows so far; queries also over the
            query heads of a KV head.
        rows: how many there are.
        found: [heads, head_dim], the last query that sentences were chosen by.
        sentences: how many there are before it.
    """

    queries: Float32Array
    keys: Float32Array
    rows: int
    found: Float32Array
    sentences: int

    def after(self, query: Float32Array, key: Float32Array, found: Float32Array) -> "_Progress":
        """Return what is known after a row that chose by ``found``."""
        return _Progress(
            self.queries + query, self.keys + key, self.rows + 1, found, self.sentences
        )

    def closed(self) -> "_Progress":
        """Return what is known when the sentence has ended."""
        nothing = np.zeros_like(self.queries)
        return _Progress(nothing, nothing, 0, self.found, self.sentences + 1)


class _Sentences:
    """Where the sentences of each head begin, and their mean keys.

    Args:
        bounds: [heads, n + 1] int32, numbers of keys.
        means: float32 [heads, n, head_dim].
    """

    def __init__(self, bounds: Int32Array, means: Float32Array) -> None:
        self._bounds, self._means = bounds, means

    def first(self, count: int) -> tuple[Int32Array, Float32Array]:
        """Return the bounds and mean keys of the first sentences, views."""
        return self._bounds[:, : count + 1], self._means[:, :count]

    def append(self, count: int, mean: Float32Array, end: int) -> None:
        """Put a sentence after the first ``count``, which ends before the key ``end``."""
        if count == self._means.shape[1]:
            more = [(0, 0), (0, max(count, 16))]
            self._bounds = np.pad(self._bounds, more)
            self._means = np.pad(self._means, [*more, (0, 0)])
        self._bounds[:, count + 1] = end
        self._means[:, count] = mean


@dataclass(frozen=True)
class _Row:
    """A row in the step that runs.

    Attributes:
        position: its number.
        ends: whether its token ends a sentence.
        found: the query that it has chosen by.
        keys: how many it sees, its own included, if it read all.
    """

    position: int
    ends: bool
    found: Float32Array
    keys: int


class _Library:
    """What a sequence knows once its prompt is computed.

    Attributes:
        parked: keys outside the pool.
        sentences: over these and later keys.
        before: how many fewer keys than tokens there are, since some weren't retained.
        progress: by the position of the row before which it is known.
    """

    def __init__(self, parked: ParkedKeys, sentences: _Sentences, before: int) -> None:
        self.parked, self.sentences, self.before = parked, sentences, before
        self.progress: dict[int, _Progress] = {}


@dataclass(frozen=True)
class ReaderState:
    """What sequences that look sentences up have in common.

    Attributes:
        runner: the model and its KV cache.
        pool: its slots.
        reads: counts what is read.
    """

    runner: Runner
    pool: KVPool
    reads: SentenceReads

    @property
    def heads(self) -> int:
        """layers * kv_heads."""
        return self.runner.config.layers * self.runner.config.kv_heads

    def cells(self, slots: Int32Array) -> Int32Array:
        """Return the cells of [n] slots in every head: [heads, n] int32."""
        return cells_of_slots(slots, self.heads, self.runner.slots)


class SentenceReader(SequenceMethod):
    """A sequence's sentences, and what its rows read.

    Args:
        name: how requests name the method.
        method: what is read.
        state: of all sequences.
        prompt: how many of the first tokens are computed exactly.
    """

    title = "the method that looks sentences up"
    changes = frozenset({Aspect.KEYS, Aspect.LISTS})
    needs = frozenset({Aspect.ROWS, Aspect.POSITIONS})

    def __init__(self, name: str, method: ChosenSentences, state: ReaderState, prompt: int) -> None:
        self.name = name
        self._method, self._state, self._prompt = method, state, prompt
        self._window: list[Float32Array] = []
        self._query: Float32Array = np.zeros((0, 0), np.float32)
        self._library: _Library | None = None
        self._row: _Row | None = None

    # --- how it may run

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """See ``SequenceMethod``: the last rows of the prompt vote, so they run."""
        return min(limit, max(self._prompt - self._method.rule.window, 0))

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``: a row after the prompt chooses by the rows before it."""
        return self._prompt if sequence.computed < self._prompt else sequence.computed + 1

    # --- its rows in a step

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        """See ``SequenceMethod``: the last ones of the prompt, and all after it."""
        first = max(self._prompt - self._method.rule.window - sequence.computed, 0)
        return range(first, max(first, tokens))

    def observe(self, first: int, queries: Float32Array) -> None:
        """See ``SequenceMethod``."""
        if first < self._prompt:
            self._window.append(queries)
        else:
            self._query = self._summed(queries[:, -1])

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        """See ``SequenceMethod``: choose the row's sentences, and fetch them.

        Raises:
            ValueError: several rows after the prompt were to run in one step.
        """
        library = self._library
        if library is None:
            return rows
        if end != first + 1:
            raise ValueError("rows that look sentences up run one by one")
        if not sequence.may_be_empty:  # otherwise tokens may be taken back
            library.progress = {first: library.progress[first]}
        reads, rule = self._state.reads, self._method.rule
        keys = first + 1 - library.before
        listed = self._choose(library, sequence, first, keys)
        # The last keys that are still in the sequence's slots are read there, the others by cell.
        tail = min(rule.recent, keys - library.parked.count)
        wanted = listed[:, : library.parked.count]
        reads.fetched += library.parked.fetch(wanted)
        reads.listed += int(np.count_nonzero(wanted))
        head, number = (axis.astype(np.int32) for axis in np.nonzero(listed[:, : keys - tail]))
        cells = np.empty(len(head), np.int32)
        is_parked = number < library.parked.count
        cells[is_parked] = library.parked.cells(head[is_parked], number[is_parked])
        in_slots = self._state.cells(rows.kv_slots)
        cells[~is_parked] = in_slots[head[~is_parked], number[~is_parked] - library.parked.count]
        ends = np.searchsorted(head, np.arange(len(listed) + 1)).astype(np.int32)
        plan = replace(rows.plan or AttentionPlan(), cells=RaggedIndex(cells, ends))
        config = self._state.runner.config
        group = config.query_heads // config.kv_heads
        reads.pairs += group * int(np.count_nonzero(listed))
        reads.causal += (first + 1) * config.query_heads * config.layers
        reads.rows += 1
        return rows._replace(kv_slots=rows.kv_slots[len(rows.kv_slots) - tail :], plan=plan)

    def _choose(
        self, library: _Library, sequence: SequenceView, first: int, keys: int
    ) -> BoolArray:
        """Return which keys the row at a position reads: [heads, keys] bool."""
        rule, progress = self._method.rule, library.progress[first]
        ends = bool(self._method.ends(sequence.tokens[first : first + 1], first)[0])
        is_first = ends or progress.rows < rule.warmup
        found = progress.found if is_first else progress.queries / np.float32(progress.rows)
        self._row = _Row(first, ends, found, keys)
        if is_first and rule.reads_all:
            return np.ones((self._state.heads, keys), bool)
        bounds, means = library.sentences.first(progress.sentences)
        scores = similarities(means, found)
        if self._method.rank is not None:
            scores = self._method.rank(scores, first)
        self._state.reads.choices += keys > rule.budget
        return chosen_keys(scores, bounds, keys, rule)

    def _summed(self, queries: Float32Array) -> Float32Array:
        """Return [layers, query_heads, head_dim] queries, summed for each KV head: [heads, dim]."""
        config = self._state.runner.config
        grouped = queries.reshape(self._state.heads, -1, config.head_dim)
        summed: Float32Array = grouped.sum(axis=1)
        return summed

    # --- what happens to it

    def committed(self, sequence: SequenceView) -> int:
        """See ``SequenceMethod``: the row counts for the next ones of its sentence."""
        row, library, kv = self._row, self._library, sequence.kv
        if row is None or library is None or kv is None:
            return sequence.computed
        self._row = None
        slot = kv.slots[row.position - kv.first : row.position - kv.first + 1]
        key = self._state.runner.cells.read_keys(self._state.cells(slot)[:, 0])
        progress = library.progress[row.position].after(self._query, key, row.found)
        if row.ends:
            mean = progress.keys / np.float32(progress.rows)
            library.sentences.append(progress.sentences, mean, row.keys)
            progress = progress.closed()
        library.progress[row.position + 1] = progress
        return sequence.computed

    def decide(self, sequence: SequenceView) -> bool:
        """See ``SequenceMethod``: move what is computed out of the pool."""
        kv, library = sequence.kv, self._library
        if kv is None:
            return True
        if library is None:
            return sequence.computed != self._prompt or self._open(sequence, kv)
        computed = sequence.computed - kv.first
        if computed < _PARKED_TOKENS or sequence.may_be_empty:
            return True
        places = self._method.rule.places(library.parked.count + computed)
        if not self._has_room(kv, places):
            return False
        library.parked.add(self._state.cells(kv.slots[:computed]))
        self._move(library.parked, kv, places, sequence.computed)
        return True

    def _open(self, sequence: SequenceView, kv: SequenceKV) -> bool:
        """Retain what is to be retained of the prompt; return False if there is no room for it."""
        state, method, tokens = self._state, self._method, self._prompt
        cells, store = state.cells(kv.slots[:tokens]), state.runner.cells
        queries = np.concatenate(self._window, axis=1)
        keys = SequenceKeys(state.runner.config, list(cells), store)
        numbers = retained_keys(keys, queries, method.rule)
        places = method.rule.places(numbers.shape[1])
        if not self._has_room(kv, places):
            return False
        self._window = []
        kept = np.take_along_axis(cells, numbers, axis=1)
        bounds = sentence_bounds(method.ends(sequence.tokens[:tokens], 0), numbers)
        means = [
            mean_keys(store.read_keys(head), own) for head, own in zip(kept, bounds, strict=True)
        ]
        most = numbers.shape[1] + sequence.max_length - tokens
        parked = ParkedKeys(store, state.runner.slots, state.heads, most)
        parked.add(kept)
        before = tokens - numbers.shape[1]
        self._library = library = _Library(parked, _Sentences(bounds, np.stack(means)), before)
        nothing = np.zeros((state.heads, state.runner.config.head_dim), np.float32)
        found = self._summed(queries.mean(axis=1))
        library.progress[tokens] = _Progress(nothing, nothing, 0, found, bounds.shape[1] - 1)
        self._move(parked, kv, places, tokens)
        return True

    def _has_room(self, kv: SequenceKV, places: int) -> bool:
        pool = self._state.pool
        return pool.available + pool.cache.released_by(kv.nodes) + kv.owned >= places

    def _move(self, parked: ParkedKeys, kv: SequenceKV, places: int, tokens: int) -> None:
        """Release all slots but those for copies of keys, given how many tokens are computed."""
        slots = kv.exchange(places)
        # What rows see of them is said row by row.
        nothing = RaggedIndex(np.zeros(0, np.int32), np.zeros(self._state.heads + 1, np.int32))
        kv.prefix = CompressedPrefix(tokens, nothing, slots, self._state.pool.slots)
        parked.use_slots(slots)
        reads = self._state.reads
        reads.parked_bytes = max(reads.parked_bytes, parked.nbytes)

    def rolled_back(self, computed: int) -> None:
        """See ``SequenceMethod``."""
        if self._library is not None:
            known = self._library.progress
            self._library.progress = {at: known[at] for at in known if at <= computed}

    def shares_slots(self, is_compressed: bool) -> bool:
        """See ``SequenceMethod``: each answer has its own copies in the pool."""
        return False

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        self._window, self._library, self._row = [], None, None

    def fork(self) -> "SentenceReader":
        """See ``SequenceMethod``: the other answer begins with the prompt."""
        return SentenceReader(self.name, self._method, self._state, self._prompt)


class SentenceKind(PlainLengths):
    """Puts methods that look sentences up to work.

    Args:
        runner: the model and its KV cache.
        pool: the runner's slots.

    Attributes:
        reads: what was read.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self.reads = SentenceReads()
        self._state = ReaderState(runner, pool, self.reads)

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        if not isinstance(method, ChosenSentences):
            return None
        return SentenceReader(name, method, self._state, request.compress_after)
