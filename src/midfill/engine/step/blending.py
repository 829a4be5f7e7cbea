"""Blending: prefill a prompt with KV of the same text from elsewhere, repaired by a method.

A prompt whose caret has moved is mostly text that was computed before, at other positions. Of the
tokens after the exact cached prefix, up to the last that can be copied:

1. runs that stand in recently cached texts of the tenant are found (``kv.token_runs``), and their
   KV is copied into the sequence's slots, keys turned to the new positions;
2. all rows run through the first layers, up to the method's check layer (shallow);
3. the method chooses which copied rows are computed on; these and the rows that have no copy run
   through the layers above (deep), each attending to everything before it.

What follows is ordinary prefill, so the last token always runs through all layers, and sampling
knows nothing of this. The work is cut into steps like any prefill's: ``advance`` gets a number of
tokens that would take as long through all layers.

KV that has been blended goes to a branch of the cache (``kv.branches``), and so does what is
computed over it: the next keystroke continues there, until the exact KV of the prompt is cached. A
source is copied in the step that admits the sequence, so it need not be locked: what has been
evicted by then is not found. Which texts are cached decides what an answer attends to, so unlike
all others these answers can depend on what was asked before.
"""

import numpy as np
import torch

from midfill.arrays import Int32Array, Int64Array
from midfill.engine.blend import MIN_SAVED_ROWS, Blend
from midfill.engine.sampling.sampler import one_thread
from midfill.engine.sequences.sequence import Sequence
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CachedText
from midfill.kv.ragged import cells_of_slots
from midfill.kv.sequence_kv import SequenceKV
from midfill.kv.token_runs import TokenRun, find_runs
from midfill.methods.reuse.method import LayerKV
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner

_MAX_SOURCE_TOKENS = 32_768
_MAX_ROWS = 512


class Blending:
    """The engine's part of every method of reuse.

    Args:
        runner: the model and its KV cache.
        pool: the runner's slots.

    Attributes:
        computed_row_layers: rows times layers that were computed.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._runner = runner
        self._pool = pool
        self.computed_row_layers = 0

    def start(self, sequence: Sequence) -> None:
        """Copy KV for a sequence that was just admitted, if it saves enough.

        ``sequence.blend`` is set then, and from now on its KV is not exact.

        It holds slots for all its tokens. Prompts whose tokens are scored are computed in full, and
        so are answers that begin again behind their first token.
        """
        method, kv = sequence.reuse, sequence.kv
        if method is None or kv is None or not kv.is_exact or sequence.next_scored is not None:
            return
        first, last = sequence.computed, sequence.length - 1
        if sequence.length > sequence.prompt_length or last - first < method.min_run:
            return
        texts = self._pool.cache.recent_texts(sequence.tenant, _MAX_SOURCE_TOKENS, method.min_run)
        tokens = sequence.tokens[:last]
        runs = find_runs(tokens, first, [text.tokens for text in texts], method.min_run)
        copied = sum(run.length for run in runs)
        layers = self._runner.config.layers
        kept_layers = (copied - method.recomputed(copied)) * (layers - method.check_layer - 1)
        if not runs or kept_layers < MIN_SAVED_ROWS * layers:
            return
        with one_thread():
            reference = self._copy(kv, runs, texts, method.check_layer)
        numbers = np.concatenate([np.arange(run.start, run.end) for run in runs])
        sequence.blend = Blend(method, runs[-1].end, numbers, reference, first)

    def advance(self, sequence: Sequence, tokens: int) -> int:
        """Run some of a sequence's blended prefill; it ends with ``sequence.blend`` None.

        Args:
            sequence: holds slots for all its tokens.
            tokens: do work that so many rows would be through all layers, at least 1.

        Returns:
            How many of ``tokens`` are left; 0 until the blended prefill has ended.
        """
        blend, kv = sequence.blend, sequence.kv
        assert blend is not None
        assert kv is not None
        layers, first_deep = self._runner.config.layers, blend.method.check_layer + 1
        budget = tokens * layers
        while blend.shallow < blend.end and budget > 0:
            count = max(min(blend.end - blend.shallow, _MAX_ROWS, budget // first_deep), 1)
            rows = np.arange(blend.shallow, blend.shallow + count)
            blend.hidden.append(self._run(sequence, rows, None, 0, first_deep))
            blend.shallow += count
            budget -= count * first_deep
        if blend.shallow < blend.end:
            return 0
        if blend.rows is None:
            self._select(blend, kv, sequence.computed)
        assert blend.rows is not None
        cost = layers - first_deep
        while blend.deep < len(blend.rows) and budget > 0:
            count = max(min(len(blend.rows) - blend.deep, _MAX_ROWS, budget // cost), 1)
            rows = blend.rows[blend.deep : blend.deep + count]
            hidden = blend.hidden[0][blend.deep : blend.deep + count].contiguous()
            self._run(sequence, rows, hidden, first_deep, layers)
            blend.deep += count
            budget -= count * cost
        if blend.deep < len(blend.rows):
            return 0
        recomputed = int(np.isin(blend.copied, blend.rows).sum())
        sequence.reused_tokens = len(blend.copied) - recomputed
        sequence.computed, sequence.blend = blend.end, None
        return max(budget // layers, 0)

    def _copy(
        self, kv: SequenceKV, runs: list[TokenRun], texts: list[CachedText], check_layer: int
    ) -> LayerKV:
        """Copy the runs' KV of the check layer and those above; return the check layer's."""
        config = self._runner.config
        heads, store = config.kv_heads, self._runner.cells
        local = config.local_rope_theta is not None
        above = list(range(check_layer, config.layers))
        for run in runs:
            source = texts[run.source].slots[run.source_start :][: run.length]
            taken = self._cells(source, above)
            shift = np.full(len(taken), run.shift, np.int32) if run.shift else None
            each = np.repeat(np.array(above, np.int32), heads * run.length) if local else None
            target = self._cells(kv.slots[run.start : run.end], above)
            store.put(target, store.take(taken, shift, each))
        numbers = np.concatenate([np.arange(run.start, run.end) for run in runs])
        return self._read(kv.slots[numbers], check_layer)

    def _select(self, blend: Blend, kv: SequenceKV, first: int) -> None:
        """Have the method choose, and keep the hidden rows that run on."""
        with one_thread():
            computed = self._read(kv.slots[blend.copied], blend.method.check_layer)
            chosen = blend.method.select(blend.reference, computed)
        runs_on = np.ones(blend.end - first, bool)
        runs_on[blend.copied - first] = False
        runs_on[blend.copied[chosen] - first] = True
        kept = np.flatnonzero(runs_on)
        hidden = torch.cat(blend.hidden)
        blend.hidden = [hidden[torch.from_numpy(kept).to(hidden.device)]]
        blend.rows = kept + first

    def _run(
        self,
        sequence: Sequence,
        rows: Int64Array,
        hidden: torch.Tensor | None,
        first: int,
        end: int,
    ) -> torch.Tensor:
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
            hidden = self._runner.embed(batch)
        self.computed_row_layers += len(rows) * (end - first)
        return self._runner.run_layers(batch, hidden, first, end)

    def _read(self, slots: Int32Array, layer: int) -> LayerKV:
        """Return the KV of some slots in one layer."""
        config = self._runner.config
        keys, values = self._runner.cells.read(self._cells(slots, [layer]))
        shape = (config.kv_heads, len(slots), config.head_dim)
        by_token = (np.ascontiguousarray(x.reshape(shape).swapaxes(0, 1)) for x in (keys, values))
        return LayerKV(*by_token)

    def _cells(self, slots: Int32Array, layers: list[int]) -> Int32Array:
        """Return the cells of some slots in some consecutive layers: [layers * heads * n] int32."""
        heads = self._runner.config.kv_heads
        every = cells_of_slots(slots, len(layers) * heads, self._runner.slots)
        return (every + np.int32(layers[0] * heads * self._runner.slots)).reshape(-1)
