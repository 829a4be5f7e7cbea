"""Blending: prefill a prompt with KV of the same text from elsewhere, repaired by a method.

A prompt whose caret has moved is mostly text that was computed before, at other positions. Of the
tokens after the exact cached prefix, up to the last that can be copied:

1. spans that stand in cached texts of the tenant are found (``kv.donor_index``), and their KV is
   copied into the sequence's slots, keys turned to the new positions;
2. all rows run through the first layers, up to the method's check layer (shallow);
3. the method chooses which copied rows are computed on; these and the rows that have no copy run
   through the layers above (deep), each attending to everything before it.

What follows is ordinary prefill, so the last token always runs through all layers, and sampling
knows nothing of this. The work is cut into steps like any prefill's: ``run_chunk`` gets a number
of tokens that would take as long through all layers.

KV that has been blended goes to a branch of the cache (``kv.branches``), and so does what is
computed over it: the next keystroke continues there, until the exact KV of the prompt is cached. A
source is copied in the step that admits the sequence, so it need not be locked: what has been
evicted by then is not found. Which texts are cached decides what an answer attends to, so unlike
all others these answers can depend on what was asked before.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array, RunnerArray
from midfill.kv.branches import Branch, Branches
from midfill.kv.donor_index import DonorIndex, DonorSpan
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CachedPrefix
from midfill.kv.ragged import cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.reuse.method import LayerKV, ReuseMethod
from midfill.methods.sequence_method import (
    NO_METHOD,
    Admitted,
    Aspect,
    MethodChunk,
    PlainLengths,
    Prefill,
    RequestFacts,
    SequenceMethod,
    SequenceView,
)
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner

_MIN_SAVED_ROWS = 32  # a prompt is blended if that saves so many rows through all layers, or more
_MAX_ROWS = 512


class ReuseState(Protocol):
    """What a method remembers between its sequences."""

    @property
    def nbytes(self) -> int:
        """Its memory, in bytes."""


_State = TypeVar("_State", bound=ReuseState)


@dataclass
class _Blend:
    """A prefill that takes KV from elsewhere, between steps; see the module for the stages.

    Attributes:
        end: number of the first token that is left to ordinary prefill.
        copied: [n] int64, numbers of the copied tokens.
        reference: their KV in the check layer, as it was copied; None where no layer is checked.
        shallow: number of the next token to run through the first layers.
        hidden: hidden rows after the check layer, as they were computed; one array per call. None
            where no layer is checked.
        rows: [n] int64, numbers of the tokens to run through the layers above; None before the
            method has chosen.
        deep: how many of them have run.
    """

    end: int
    copied: Int64Array
    reference: LayerKV | None
    shallow: int
    hidden: list[RunnerArray] = field(default_factory=list)
    rows: Int64Array | None = None
    deep: int = 0


class Donors(NamedTuple):
    """What a prompt takes from elsewhere.

    Attributes:
        spans: in order, without overlaps; at least one.
        kept: for how many of their tokens what was copied will stay, about.
        end: number of the token before which all others are computed beside them; those after it
            are left to ordinary prefill.
        repaired: numbers of the tokens among them that are computed, [n] int64, where that is known
            at once; None where it is chosen at the check layer.
    """

    spans: list[DonorSpan]
    kept: int
    end: int
    repaired: Int64Array | None = None


class BlendedSequence(SequenceMethod):
    """A method of reuse at work on one sequence.

    Methods that find donors or repair otherwise than ``ReuseMethod`` says have classes of their
    own, which override ``find_donors``, ``choose`` and what is observed of rows.
    """

    title = "the method of reuse"
    changes = frozenset({Aspect.ROWS, Aspect.ROOT})
    needs = frozenset({Aspect.CHUNKS, Aspect.POSITIONS})

    def __init__(self, name: str, method: Hashable, shared: "ReuseKind") -> None:
        self.name = name
        self.method = method
        self.shared = shared
        self._blend: _Blend | None = None
        self._estimate: int | None = None

    @property
    def _reuse_method(self) -> ReuseMethod:
        assert isinstance(self.method, ReuseMethod)
        return self.method

    def find_branch(
        self, sequence: SequenceView, tokens: Int32Array, exact: CachedPrefix
    ) -> tuple[Branch, CachedPrefix] | None:
        """See ``SequenceMethod``."""
        return self.shared.branches.find(sequence.tenant, self.method, tokens, exact)

    def prefill(self, sequence: SequenceView) -> Prefill:
        """See ``SequenceMethod``."""
        return "chunks"

    def allows_draft(self, tokens: int) -> bool:
        """See ``SequenceMethod``: a prefill that is blended takes more steps than planned."""
        return self._blend is None and tokens < _MIN_SAVED_ROWS

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        self._blend = None

    def after_preemption(self) -> SequenceMethod:
        """See ``SequenceMethod``: computed in full from then on, so that progress is kept."""
        return NO_METHOD

    def fork(self) -> SequenceMethod:
        """See ``SequenceMethod``."""
        return type(self)(self.name, self.method, self.shared)

    def admitted(self, sequence: SequenceView) -> Admitted:
        """Copy KV, if it saves enough; from then on, the sequence's KV is not exact.

        Prompts whose tokens are scored are computed in full, and so are answers that begin again
        behind their first token.
        """
        kv = sequence.kv
        assert kv is not None
        nothing = Admitted(sequence.computed)
        if not kv.is_exact or sequence.next_scored is not None:
            return nothing
        first, last = sequence.computed, sequence.length - 1
        if sequence.length > sequence.prompt_length or last <= first:
            return nothing
        donors = self.find_donors(sequence, first, last)
        layers, shallow = self.shared.runner.config.layers, self.check_layer + 1
        if donors is None or donors.kept * (layers - shallow) < _MIN_SAVED_ROWS * layers:
            return nothing
        reference = self._copy(kv, donors.spans)
        copied = np.concatenate([np.arange(span.start, span.end) for span in donors.spans])
        self._blend = _Blend(donors.end, copied, reference, first)
        if donors.repaired is not None:
            self._blend.shallow = donors.end
            self._blend.rows = _rows_to_run(first, donors.end, copied, donors.repaired)
        base = sequence.tokens[: kv.shared]
        kv.start_branch(self.shared.branches.start(sequence.tenant, self.method, base))
        return nothing

    @property
    def check_layer(self) -> int:
        """The last layer that every row is computed through; -1 if there is none."""
        return self._reuse_method.check_layer

    @property
    def blends(self) -> bool:
        """Whether a prefill with KV from elsewhere is on its way."""
        return self._blend is not None

    @property
    def copied(self) -> Int64Array:
        """Numbers of the tokens whose KV was copied, while a prefill is on its way: [n] int64."""
        return np.zeros(0, np.int64) if self._blend is None else self._blend.copied

    def found_elsewhere(self, sequence: SequenceView, cached: int) -> int:
        """See ``SequenceMethod``: looked up once, when it is first asked for."""
        if self._estimate is None:
            last = sequence.length - 1
            donors = self.find_donors(sequence, cached, last) if cached < last else None
            self._estimate = sum(span.length for span in donors.spans) if donors else 0
        return self._estimate

    def find_donors(self, sequence: SequenceView, first: int, last: int) -> Donors | None:
        """Return what the tokens first <= i < last take from elsewhere; None if nothing."""
        method = self._reuse_method
        spans = self.shared.donors.find(
            sequence.tenant, sequence.tokens[:last], first, method.min_run
        )
        if not spans:
            return None
        copied = sum(span.length for span in spans)
        return Donors(spans, copied - method.recomputed(copied), spans[-1].end)

    def choose(
        self, sequence: SequenceView, numbers: Int64Array, copied: LayerKV, computed: LayerKV
    ) -> Int64Array:
        """Return which of the copied tokens are computed on, see ``ReuseMethod.select``.

        Args:
            sequence: whose they are.
            numbers: [n] int64, of the copied tokens.
            copied, computed: see ``ReuseMethod.select``.
        """
        return self._reuse_method.select(copied, computed)

    def observed_layers(self, first: int, end: int) -> range:
        """Return of which of the layers first <= i < end the rows' queries are wanted."""
        return range(0)

    def observe_rows(
        self, sequence: SequenceView, rows: Int64Array, layer: int, queries: Float32Array
    ) -> None:
        """Take a wanted layer's queries [n, query_heads, head_dim] of rows that have just run."""

    def run_chunk(self, sequence: SequenceView, tokens: int) -> MethodChunk | None:
        """Run a part of the blended prefill, worth as much work as so many rows in all layers."""
        blend, kv = self._blend, sequence.kv
        if blend is None or kv is None:
            return None
        layers, first_deep = self.shared.runner.config.layers, self.check_layer + 1
        budget, ran = tokens * layers, 0
        while blend.shallow < blend.end and budget > 0:
            count = max(min(blend.end - blend.shallow, _MAX_ROWS, budget // first_deep), 1)
            rows = np.arange(blend.shallow, blend.shallow + count)
            blend.hidden.append(self.run_rows(sequence, rows, None, 0, first_deep))
            blend.shallow += count
            budget -= count * first_deep
            ran += count * first_deep
        if blend.shallow < blend.end:
            return MethodChunk(0, sequence.computed, 0, ran)
        if blend.rows is None:
            self._select(blend, sequence)
        assert blend.rows is not None
        cost = layers - first_deep
        while blend.deep < len(blend.rows) and budget > 0:
            count = max(min(len(blend.rows) - blend.deep, _MAX_ROWS, budget // cost), 1)
            rows = blend.rows[blend.deep : blend.deep + count]
            hidden = None
            if blend.hidden:
                hidden = blend.hidden[0][blend.deep : blend.deep + count]
            self.run_rows(sequence, rows, hidden, first_deep, layers)
            blend.deep += count
            budget -= count * cost
            ran += count * cost
        if blend.deep < len(blend.rows):
            return MethodChunk(0, sequence.computed, 0, ran)
        recomputed = int(np.isin(blend.copied, blend.rows).sum())
        self._blend = None
        reused = len(blend.copied) - recomputed
        return MethodChunk(max(budget // layers, 0), blend.end, reused, ran)

    def _copy(self, kv: SequenceKV, runs: list[DonorSpan]) -> LayerKV | None:
        """Copy the runs' KV of the check layer and those above; return the check layer's."""
        config = self.shared.runner.config
        heads, store = config.kv_heads, self.shared.runner.cells
        local = config.local_rope_theta is not None
        above = list(range(max(self.check_layer, 0), config.layers))
        for run in runs:
            taken = self._cells(run.slots, above)
            shift = np.full(len(taken), run.shift, np.int32) if run.shift else None
            each = np.repeat(np.array(above, np.int32), heads * run.length) if local else None
            target = self._cells(kv.slots[run.start : run.end], above)
            store.put(target, store.take(taken, shift, each))
        if self.check_layer < 0:
            return None
        numbers = np.concatenate([np.arange(run.start, run.end) for run in runs])
        return self.read_kv(kv.slots[numbers], self.check_layer)

    def _select(self, blend: _Blend, sequence: SequenceView) -> None:
        """Have the method choose, and keep the hidden rows that run on."""
        assert sequence.kv is not None
        assert blend.reference is not None
        first = sequence.computed
        computed = self.read_kv(sequence.kv.slots[blend.copied], self.check_layer)
        chosen = self.choose(sequence, blend.copied, blend.reference, computed)
        blend.rows = _rows_to_run(first, blend.end, blend.copied, blend.copied[chosen])
        blend.hidden = [self.shared.runner.join(blend.hidden)[blend.rows - first]]

    def run_rows(
        self,
        sequence: SequenceView,
        rows: Int64Array,
        hidden: RunnerArray | None,
        first: int,
        end: int,
    ) -> RunnerArray:
        """Run rows through some layers; None embeds them first. Returns the hidden rows."""
        assert sequence.kv is not None
        seen = int(rows[-1]) + 1
        slots = sequence.kv.slots[:seen]
        batch = ForwardBatch(
            token_ids=sequence.tokens[rows],
            positions=rows.astype(np.int32),
            write_slots=slots[rows],
            query_indptr=np.array([0, len(rows)], np.int32),
            kv_indptr=np.array([0, seen], np.int32),
            kv_slots=slots,
            logit_rows=np.zeros(0, np.int32),
            visible_slots=(rows + 1).astype(np.int32),
        )
        runner, observed = self.shared.runner, self.observed_layers(first, end)
        if observed:
            batch = replace(batch, observed_rows=np.arange(len(rows), dtype=np.int32))
        hidden = runner.run_layers(
            batch, runner.embed(batch) if hidden is None else hidden, first, end
        )
        for layer in observed:
            (queries,) = runner.observed_queries(batch, layer, layer + 1)
            self.observe_rows(sequence, rows, layer, queries)
        return hidden

    def read_kv(self, slots: Int32Array, layer: int) -> LayerKV:
        """Return the KV of some slots in one layer."""
        config = self.shared.runner.config
        keys, values = self.shared.runner.cells.read(self._cells(slots, [layer]))
        shape = (config.kv_heads, len(slots), config.head_dim)
        by_token = (np.ascontiguousarray(x.reshape(shape).swapaxes(0, 1)) for x in (keys, values))
        return LayerKV(*by_token)

    def read_keys(self, slots: Int32Array, layer: int) -> Float32Array:
        """Return the keys of some slots in one layer: float32 [n, kv_heads, head_dim]."""
        config = self.shared.runner.config
        keys = self.shared.runner.cells.read_keys(self._cells(slots, [layer]))
        return keys.reshape(config.kv_heads, len(slots), config.head_dim).swapaxes(0, 1)

    def _cells(self, slots: Int32Array, layers: list[int]) -> Int32Array:
        """Return the cells of some slots in some consecutive layers: [layers * heads * n] int32."""
        heads = self.shared.runner.config.kv_heads
        every = cells_of_slots(slots, len(layers) * heads, self.shared.runner.slots)
        return (every + np.int32(layers[0] * heads * self.shared.runner.slots)).reshape(-1)


def _rows_to_run(first: int, end: int, copied: Int64Array, repaired: Int64Array) -> Int64Array:
    """Return the numbers first <= i < end but for those copied and not repaired: [n] int64."""
    runs = np.ones(end - first, bool)
    runs[copied - first] = False
    runs[repaired - first] = True
    return np.flatnonzero(runs) + first


@runtime_checkable
class OwnSequences(Protocol):
    """A method of reuse whose sequences are of a class of their own."""

    def __hash__(self) -> int: ...

    def attach(
        self, name: str, request: RequestFacts, shared: "ReuseKind"
    ) -> BlendedSequence | None:
        """Return what works on a new sequence; None if there is nothing to do for it."""


class ReuseKind(PlainLengths):
    """Puts methods of reuse to work.

    Attributes:
        runner: the model and its KV cache.
        pool: the runner's slots.
        branches: where KV goes that is not exact.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self.runner = runner
        self.pool = pool
        self.branches = Branches(pool.cache)
        self._donors: DonorIndex | None = None
        self._states: dict[Hashable, ReuseState] = {}

    @property
    def donors(self) -> DonorIndex:
        """Where cached text stands; it follows the cache from when it is first asked for."""
        if self._donors is None:
            self._donors = DonorIndex(self.pool.slots.total)
            self.pool.cache.watch(self._donors)
        return self._donors

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        if isinstance(method, OwnSequences):
            return method.attach(name, request, self)
        return BlendedSequence(name, method, self) if isinstance(method, ReuseMethod) else None

    def state_of(self, method: Hashable, new: Callable[[], _State]) -> _State:
        """Return what a method remembers between its sequences; ``new`` makes it."""
        if method not in self._states:
            self._states[method] = new()
        return cast(_State, self._states[method])

    @property
    def nbytes(self) -> int:
        """Memory of the index and of what methods remember, in bytes; KV in slots isn't counted."""
        index = 0 if self._donors is None else self._donors.nbytes
        return index + sum(state.nbytes for state in self._states.values())
