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

from dataclasses import dataclass, field

import numpy as np

from midfill.arrays import Int32Array, Int64Array, RunnerArray
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


@dataclass
class _Blend:
    """A prefill that takes KV from elsewhere, between steps; see the module for the stages.

    Attributes:
        end: number of the first token that is left to ordinary prefill.
        copied: [n] int64, numbers of the copied tokens.
        reference: their KV in the check layer, as it was copied.
        shallow: number of the next token to run through the first layers.
        hidden: hidden rows after the check layer, as they were computed; one array per call.
        rows: [n] int64, numbers of the tokens to run through the layers above; None before the
            method has chosen.
        deep: how many of them have run.
    """

    end: int
    copied: Int64Array
    reference: LayerKV
    shallow: int
    hidden: list[RunnerArray] = field(default_factory=list)
    rows: Int64Array | None = None
    deep: int = 0


class BlendedSequence(SequenceMethod):
    """A method of reuse at work on one sequence."""

    title = "the method of reuse"
    changes = frozenset({Aspect.ROWS, Aspect.ROOT})
    needs = frozenset({Aspect.CHUNKS, Aspect.POSITIONS})

    def __init__(self, name: str, method: ReuseMethod, shared: "ReuseKind") -> None:
        self.name = name
        self._method = method
        self._shared = shared
        self._blend: _Blend | None = None

    def find_branch(
        self, sequence: SequenceView, tokens: Int32Array, exact: CachedPrefix
    ) -> tuple[Branch, CachedPrefix] | None:
        """See ``SequenceMethod``."""
        return self._shared.branches.find(sequence.tenant, self._method, tokens, exact)

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

    def fork(self) -> "BlendedSequence":
        """See ``SequenceMethod``."""
        return BlendedSequence(self.name, self._method, self._shared)

    def admitted(self, sequence: SequenceView) -> Admitted:
        """Copy KV, if it saves enough; from then on, the sequence's KV is not exact.

        Prompts whose tokens are scored are computed in full, and so are answers that begin again
        behind their first token.
        """
        method, kv = self._method, sequence.kv
        assert kv is not None
        nothing = Admitted(sequence.computed)
        if not kv.is_exact or sequence.next_scored is not None:
            return nothing
        first, last = sequence.computed, sequence.length - 1
        if sequence.length > sequence.prompt_length or last - first < method.min_run:
            return nothing
        tokens = sequence.tokens[:last]
        runs = self._shared.donors.find(sequence.tenant, tokens, first, method.min_run)
        copied = sum(run.length for run in runs)
        layers = self._shared.runner.config.layers
        kept_layers = (copied - method.recomputed(copied)) * (layers - method.check_layer - 1)
        if not runs or kept_layers < _MIN_SAVED_ROWS * layers:
            return nothing
        reference = self._copy(kv, runs, method.check_layer)
        numbers = np.concatenate([np.arange(run.start, run.end) for run in runs])
        self._blend = _Blend(runs[-1].end, numbers, reference, first)
        base = sequence.tokens[: kv.shared]
        kv.start_branch(self._shared.branches.start(sequence.tenant, method, base))
        return nothing

    def run_chunk(self, sequence: SequenceView, tokens: int) -> MethodChunk | None:
        """Run a part of the blended prefill, worth as much work as so many rows in all layers."""
        blend, kv = self._blend, sequence.kv
        if blend is None or kv is None:
            return None
        layers, first_deep = self._shared.runner.config.layers, self._method.check_layer + 1
        budget, ran = tokens * layers, 0
        while blend.shallow < blend.end and budget > 0:
            count = max(min(blend.end - blend.shallow, _MAX_ROWS, budget // first_deep), 1)
            rows = np.arange(blend.shallow, blend.shallow + count)
            blend.hidden.append(self._run(sequence, rows, None, 0, first_deep))
            blend.shallow += count
            budget -= count * first_deep
            ran += count * first_deep
        if blend.shallow < blend.end:
            return MethodChunk(0, sequence.computed, 0, ran)
        if blend.rows is None:
            self._select(blend, kv, sequence.computed)
        assert blend.rows is not None
        cost = layers - first_deep
        while blend.deep < len(blend.rows) and budget > 0:
            count = max(min(len(blend.rows) - blend.deep, _MAX_ROWS, budget // cost), 1)
            rows = blend.rows[blend.deep : blend.deep + count]
            hidden = blend.hidden[0][blend.deep : blend.deep + count]
            self._run(sequence, rows, hidden, first_deep, layers)
            blend.deep += count
            budget -= count * cost
            ran += count * cost
        if blend.deep < len(blend.rows):
            return MethodChunk(0, sequence.computed, 0, ran)
        recomputed = int(np.isin(blend.copied, blend.rows).sum())
        self._blend = None
        reused = len(blend.copied) - recomputed
        return MethodChunk(max(budget // layers, 0), blend.end, reused, ran)

    def _copy(self, kv: SequenceKV, runs: list[DonorSpan], check_layer: int) -> LayerKV:
        """Copy the runs' KV of the check layer and those above; return the check layer's."""
        config = self._shared.runner.config
        heads, store = config.kv_heads, self._shared.runner.cells
        local = config.local_rope_theta is not None
        above = list(range(check_layer, config.layers))
        for run in runs:
            taken = self._cells(run.slots, above)
            shift = np.full(len(taken), run.shift, np.int32) if run.shift else None
            each = np.repeat(np.array(above, np.int32), heads * run.length) if local else None
            target = self._cells(kv.slots[run.start : run.end], above)
            store.put(target, store.take(taken, shift, each))
        numbers = np.concatenate([np.arange(run.start, run.end) for run in runs])
        return self._read(kv.slots[numbers], check_layer)

    def _select(self, blend: _Blend, kv: SequenceKV, first: int) -> None:
        """Have the method choose, and keep the hidden rows that run on."""
        computed = self._read(kv.slots[blend.copied], self._method.check_layer)
        chosen = self._method.select(blend.reference, computed)
        runs_on = np.ones(blend.end - first, bool)
        runs_on[blend.copied - first] = False
        runs_on[blend.copied[chosen] - first] = True
        kept = np.flatnonzero(runs_on)
        blend.hidden = [self._shared.runner.join(blend.hidden)[kept]]
        blend.rows = kept + first

    def _run(
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
        if hidden is None:
            hidden = self._shared.runner.embed(batch)
        return self._shared.runner.run_layers(batch, hidden, first, end)

    def _read(self, slots: Int32Array, layer: int) -> LayerKV:
        """Return the KV of some slots in one layer."""
        config = self._shared.runner.config
        keys, values = self._shared.runner.cells.read(self._cells(slots, [layer]))
        shape = (config.kv_heads, len(slots), config.head_dim)
        by_token = (np.ascontiguousarray(x.reshape(shape).swapaxes(0, 1)) for x in (keys, values))
        return LayerKV(*by_token)

    def _cells(self, slots: Int32Array, layers: list[int]) -> Int32Array:
        """Return the cells of some slots in some consecutive layers: [layers * heads * n] int32."""
        heads = self._shared.runner.config.kv_heads
        every = cells_of_slots(slots, len(layers) * heads, self._shared.runner.slots)
        return (every + np.int32(layers[0] * heads * self._shared.runner.slots)).reshape(-1)


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
        return BlendedSequence(name, method, self) if isinstance(method, ReuseMethod) else None
