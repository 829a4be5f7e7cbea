"""Requests whose rows attend to several parts, or to the keys that a lister chooses.

They run inside the step's one call, by a kernel that is compiled when a step first needs it. Where
there is a lister, the pass stops before each layer's attention, to ask it. Loaded when needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numba import typeof

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import (
    PARTIAL,
    REQUEST,
    AttentionHeads,
    AttentionMetadata,
)
from midfill.kernels.cpu.attention_parts import (
    REQUEST_FIELDS,
    AttentionParts,
    QuantizedTable,
    SelectorTable,
    no_parts,
)
from midfill.kernels.cpu.calls import kernel_address
from midfill.kernels.cpu.decoder_data import Batch, Stages, Workspace
from midfill.kernels.cpu.kv_cache import KVArray, KVCache, LayerKV
from midfill.kernels.cpu.memory import aligned_zeros
from midfill.kernels.cpu.parts.attention import MAX_PARTIAL_ROWS, attend_parts
from midfill.kernels.cpu.parts.keys import (
    BLOCK,
    NUMBERS,
    PartKeys,
    PartRows,
    PartScratch,
    scratch_size,
)
from midfill.kernels.cpu.parts.page_selector import MAX_GROUP, select_pages
from midfill.kernels.cpu.parts.probe import mean_keys, probe_masses
from midfill.kernels.cpu.parts.quantized_attention import attend_quantized_segment
from midfill.kernels.cpu.parts.tree_search import SEARCH_ROOM, RowSearch, search_keys
from midfill.kernels.cpu.ragged_cells import HeadKeys, pack_ragged
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.simd import LANES
from midfill.kernels.cpu.sinks import SinkHeads
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kernels.cpu.thread_pool import ThreadPool
from midfill.kv.quantized import QuantizedBlocks
from midfill.kv.quantized_layout import CELLS_AT
from midfill.models.config import ModelConfig
from midfill.runners.cpu.page_selection import PackedSelections, pack_selections
from midfill.runners.forward.attention import (
    QUERY_BLOCK,
    AttentionPlan,
    KeyLister,
    KeyPart,
    SpanLists,
    query_blocks,
)
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.page_selection import Search
from midfill.runners.forward.tree_search import TreeRule


class PartAttention:
    """The kernels of attention over parts, with the memory they need.

    Args:
        config: the model.
        pool: the threads.
        cache: the KV cache.
        stride: of the workspace's queries, see ``Queries``.
        sinks: of all layers, for their type; None if the model has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: ThreadPool,
        cache: KVCache,
        stride: int,
        sinks: Float32Array | None,
    ) -> None:
        self.config = config
        self._sinks = sinks
        self._pool = pool
        self._cache = cache
        self._stride = stride
        threads = pool.threads
        self._scratch = aligned_zeros((threads, scratch_size(config.head_dim)), np.float32)
        self._numbers = aligned_zeros((threads, NUMBERS), np.int32)
        self._weights = self._states = aligned_zeros((threads, 0), np.float32)
        self._address = self._quantized_address = self._selector_address = 0
        self._summaries: KVArray = cache.keys[:0]
        self._capacity = 0

    @property
    def summary_bytes(self) -> int:
        """Memory of the summaries of pages of keys."""
        return self._summaries.nbytes

    def run(
        self,
        batch: ForwardBatch,
        prepared: Batch,
        stages: Stages,
        workspace: Workspace,
        execute: Callable[[Batch, Stages], None],
    ) -> None:
        """Run a part of the forward pass over a batch in which some requests have parts.

        Layers with a sliding window are computed densely.

        Args:
            batch: the step.
            prepared: the batch as the kernels take it, all of it to be computed densely.
            stages: what to run; at least one layer.
            workspace: of the step, large enough.
            execute: runs a part of the forward pass over a prepared batch.
        """
        plans = [(number, plan) for number, plan in batch.plans() if not plan.is_dense]
        parts = self._prepare(batch, plans)
        packed = self._select(batch, plans)
        if packed is not None:
            parts = self._with_selector(parts, packed)
        others = prepared._replace(
            attention=_without(prepared.attention, [number for number, _ in plans]), parts=parts
        )
        address = self._kernel(parts, workspace)
        probes = self._probes(batch, plans, parts, workspace)
        first, end = stages.first_layer, stages.end_layer
        if not probes and not any(map(self._is_windowed, range(first, end))):
            execute(others, stages._replace(attend_parts=address))
            if packed is not None:
                packed.take(parts.pairs)
            return
        execute(prepared, Stages(stages.embed, first, first, False, project=True))
        for layer, after in self._runs(first, end, one_by_one=bool(probes)):
            last = after == end
            stage = Stages(False, layer, after, last and stages.logits, True, not last)
            if self._is_windowed(layer):
                execute(prepared, stage)
                continue
            lists = [lister.plan(probe.at(layer)) for lister, probe in probes]
            every = lists if packed is None else [*lists, packed.lists]
            listed = _with_lists(parts, every) if every else parts
            execute(others._replace(parts=listed), stage._replace(attend_parts=address))
            self._record(layer, [lister for lister, _ in probes], lists, listed)
            if packed is not None:
                packed.take(listed.pairs[-(len(packed.lists.indptr) - 1) :])

    def _runs(self, first: int, end: int, *, one_by_one: bool) -> list[tuple[int, int]]:
        """Return runs of layers [first, end) that are alike: all with a window, or all without."""
        windowed = list(map(self._is_windowed, range(first, end)))
        later = [
            first + place
            for place, (before, own) in enumerate(pairwise(windowed), 1)
            if one_by_one or before != own
        ]
        return list(zip([first, *later], [*later, end], strict=True))

    def _is_windowed(self, layer: int) -> bool:
        return self.config.window_of(layer) is not None

    def masses(self, layer: int, probe: "CpuProbe", rows: int) -> tuple[Float32Array, Float32Array]:
        """See ``LayerProbe.masses``."""
        before, heads = probe.rows - rows, self.config.query_heads
        visible_at = probe.visible_at + before
        visible = probe.parts.visible
        keys = probe.first + probe.rows
        segments = -(-keys // SEGMENT)
        reach = int(visible[visible_at + rows - 1] - visible[visible_at])
        width = segments * SEGMENT + -(-reach // LANES) * LANES
        columns = aligned_zeros(heads * width, np.float32)
        diagonals = aligned_zeros(heads * width, np.float32)
        states = segments * rows * 2
        if self._states.shape[1] < states:
            threads = self._pool.threads
            self._states = aligned_zeros((threads, states), np.float32)
            self._weights = aligned_zeros((threads, states // 2 * SEGMENT), np.float32)
        self._pool.run(
            probe_masses, self._layer_kv(layer), self._heads, probe.queries, probe.parts,
            PartRows(probe.part, probe.row + before, rows, visible_at), columns, diagonals, width,
            self._weights, self._states,
        )  # fmt: skip
        by_key = columns.reshape(heads, width)[:, :keys]
        return by_key, diagonals.reshape(heads, width)[:, :keys][:, ::-1]

    def mean_keys(self, layer: int, probe: "CpuProbe", block: int) -> Float32Array:
        """See ``LayerProbe.mean_keys``."""
        if block not in (32, 64, 128):
            raise ValueError(f"blocks of keys have 32, 64 or 128 keys, not {block}")
        keys = probe.first + probe.rows
        shape = (self.config.kv_heads, -(-keys // SEGMENT) * (SEGMENT // block))
        means = aligned_zeros((*shape, self.config.head_dim), np.float32)
        self._pool.run(
            mean_keys, self._layer_kv(layer), self._heads, probe.parts, probe.part, keys, block,
            means.reshape(-1),
        )  # fmt: skip
        return means[:, : -(-keys // block)]

    def search(self, layer: int, probe: "CpuProbe", rule: TreeRule, stride: int) -> Int32Array:
        """See ``LayerProbe.search``."""
        if self._cache.keys.dtype in (np.int8, np.uint8):
            raise ValueError("keys are searched where they are not quantised")
        blocks, heads = query_blocks(probe.rows), self.config.query_heads
        room = blocks * heads * 2 * SEARCH_ROOM * rule.blocks
        chosen = blocks * heads * rule.width
        nothing = np.zeros(0, np.int32)
        table = SelectorTable(
            0, nothing, np.zeros(chosen + room, np.int32), self._summaries, self._capacity,
            np.zeros(room, np.float32),
        )  # fmt: skip
        own = PartRows(probe.part, probe.row, probe.rows, probe.visible_at)
        searched = RowSearch(
            QUERY_BLOCK, stride, rule.blocks, rule.block, rule.window, rule.sinks,
            int(rule.search is Search.CENTRES),
        )  # fmt: skip
        self._pool.run(
            search_keys, self._layer_kv(layer), self._heads, probe.queries,
            probe.parts._replace(selector=table), own, searched,
        )  # fmt: skip
        found: Int32Array = table.numbers[:chosen].reshape(blocks, heads, rule.width)
        return found

    def _prepare(
        self, batch: ForwardBatch, plans: Sequence[tuple[int, AttentionPlan]]
    ) -> AttentionParts:
        """Return the requests with their parts as the kernels take them, their lists empty."""
        config, seen = self.config, batch.slots_seen()
        requests: list[int] = []
        parts: list[KeyPart] = []
        units = partials = 0
        lists = _place_lists(config, batch, plans)
        for (number, plan), lists_at in zip(plans, lists, strict=False):
            row, end = batch.query_indptr[number : number + 2].tolist()
            start, stop = batch.kv_indptr[number : number + 2].tolist()
            rows, first = end - row, len(parts)
            for part in plan.parts:
                if part.visible is None:
                    part = replace(part, visible=np.full(rows, len(part.slots), np.int32))
                parts.append(part)
            parts.append(KeyPart(batch.kv_slots[start:stop], plan.cells, seen[row:end]))
            segments = _count_partials(config, rows, plan)
            partial = partials if segments else -1
            requests += (row, rows, first, len(parts), lists_at, units, partial, segments)
            partials += segments
            units += _count_units(config, rows, plan)
        visible = [part.visible for part in parts if part.visible is not None]
        slots_at, visible_at = _starts([part.slots for part in parts]), _starts(visible)
        ragged, _ = pack_ragged([part.cells for part in parts])
        quantized = self._pack_blocks(
            [None if part.cells is None else part.cells.quantized for part in parts]
        )
        partial_rows = partials * config.kv_heads * MAX_PARTIAL_ROWS
        factors = [(config.score_scale / part.temperature, part.power) for part in parts]
        return AttentionParts(
            np.array(requests, np.int32),
            np.stack((slots_at, visible_at), axis=1).astype(np.int32).reshape(-1),
            np.array(factors, np.float64).reshape(-1),
            np.concatenate([part.slots for part in parts]).astype(np.int32, copy=False),
            np.concatenate(visible).astype(np.int32, copy=False),
            ragged,
            quantized,
            no_parts(self._cache.keys).selector,
            np.zeros(lists[-1] + 1, np.int32),
            np.zeros(0, np.int32),
            np.zeros(lists[-1], np.int64),
            np.empty(2 * partial_rows, np.float32),
            np.empty(config.head_dim * partial_rows, np.float32),
            self._scratch,
            self._numbers,
        )

    def _select(
        self, batch: ForwardBatch, plans: Sequence[tuple[int, AttentionPlan]]
    ) -> PackedSelections | None:
        """Return what chooses pages in this step; None if nothing does."""
        if all(plan.selection is None for _, plan in plans):
            return None
        seen = batch.slots_seen()
        ends = [int(seen[batch.query_indptr[number + 1] - 1]) for number, _ in plans]
        cells = [0 if plan.cells is None else plan.cells.most for _, plan in plans]
        return pack_selections(
            self.config,
            [plan.selection for _, plan in plans],
            [sum(both) for both in zip(ends, cells, strict=True)],
        )

    def _with_selector(self, parts: AttentionParts, packed: PackedSelections) -> AttentionParts:
        """Return parts with what chooses pages, and with room for its lists behind others."""
        config = self.config
        if config.query_heads // config.kv_heads > MAX_GROUP:
            raise ValueError(f"pages are chosen by at most {MAX_GROUP} query heads per KV head")
        if self._cache.keys.dtype in (np.int8, np.uint8):
            raise ValueError("pages are chosen of keys that are not quantised")
        needed = 1 + max(
            (int(selection.entries.max(initial=-1)) for selection, _ in packed.selections)
        )
        self._reserve_summaries(needed)
        table = packed.table(self._selector_address, self._summaries, self._capacity)
        others = len(parts.pairs) - len(packed.lists.indptr) + 1
        indptr = np.concatenate((np.zeros(others, np.int32), packed.lists.indptr))
        spans = packed.lists.spans.reshape(-1)
        parts = parts._replace(selector=table, indptr=indptr, spans=spans)
        if not self._selector_address:
            pool = self._pool
            window: Any = np.int32(0)  # as in ``_kernel``
            heads = self._heads._replace(window=window)
            queries = Queries(np.zeros(0, np.float32), self._stride)
            self._selector_address = kernel_address(
                select_pages, 0, pool.threads, pool.sync, self._layer_kv(0), heads, queries, parts
            )
            table = table._replace(kernel=self._selector_address)
        return parts._replace(selector=table)

    def _reserve_summaries(self, pages: int) -> None:
        """Make room for the summaries of so many pages in each layer and head."""
        if pages <= self._capacity:
            return
        config, before = self.config, self._capacity
        heads, width = config.layers * config.kv_heads, 2 * config.head_dim
        capacity = max(pages, 2 * before, self._cache.count_entries(config.head_dim) // heads // 16)
        grown = np.zeros((heads, capacity, width), self._cache.keys.dtype)
        grown[:, :before] = self._summaries.reshape(heads, before, width)
        self._summaries, self._capacity = grown.reshape(-1), capacity

    def _kernel(self, parts: AttentionParts, workspace: Workspace) -> int:
        """Return the address of the kernel, compiled for what the forward pass calls it with."""
        if not self._address:
            if typeof(parts) != typeof(no_parts(self._cache.keys)):
                raise TypeError("attention's parts must have the types that the step expects")
            pool = self._pool
            window: Any = np.int32(0)  # of the type that the forward pass reads it in
            heads = self._heads._replace(window=window)
            self._address = kernel_address(
                attend_parts, 0, pool.threads, pool.sync, self._layer_kv(0), heads,
                Queries(workspace.qkv, self._stride), parts, workspace.attended,
            )  # fmt: skip
        return self._address

    def _pack_blocks(self, parts: Sequence[QuantizedBlocks | None]) -> QuantizedTable:
        """Return the quantised blocks of a batch's parts, with the kernel that attends to them."""
        if all(blocks is None for blocks in parts):
            return no_parts(self._cache.keys).quantized
        if not self._quantized_address:
            floats, numbers = self._scratch[0], self._numbers[0]
            sums, none = SoftmaxSums(floats, floats), no_parts(self._cache.keys)
            keys = PartKeys(
                HeadKeys(0, 0, 0, 0, False), numbers, none.ragged, none.quantized, 0, 0, 0
            )
            scratch = PartScratch(*(floats,) * 4, *(sums,) * 3, *(numbers,) * 3, floats)
            self._quantized_address = kernel_address(
                attend_quantized_segment, self._layer_kv(0), keys, 0, 0, 0, 0, 0, scratch, sums
            )
        return _joined_blocks(parts, self._quantized_address)

    def _probes(
        self,
        batch: ForwardBatch,
        plans: Sequence[tuple[int, AttentionPlan]],
        parts: AttentionParts,
        workspace: Workspace,
    ) -> list[tuple[KeyLister, "CpuProbe"]]:
        """Return what looks at the requests with a lister."""
        found = []
        queries = Queries(workspace.qkv, self._stride)
        fields = parts.requests.reshape(-1, REQUEST_FIELDS)
        for (_, plan), (row, rows, _, end, lists_at, *_) in zip(
            plans, fields.tolist(), strict=True
        ):
            if lists_at >= 0 and plan.lister is not None:
                probe = CpuProbe(self, parts, end - 1, row, rows, plan, queries)
                found.append((plan.lister, probe))
        return found

    def _record(
        self,
        layer: int,
        listers: Sequence[KeyLister],
        lists: Sequence[SpanLists],
        parts: AttentionParts,
    ) -> None:
        """Tell listers how many products of a query with a key were computed."""
        ends = np.cumsum([len(span_list.indptr) - 1 for span_list in lists])
        for lister, pairs in zip(listers, np.split(parts.pairs, ends)[:-1], strict=True):
            lister.record(layer, pairs.reshape(-1, self.config.query_heads).sum(axis=0))

    @property
    def _heads(self) -> AttentionHeads | SinkHeads:
        config = self.config
        heads = AttentionHeads(
            config.query_heads, config.kv_heads, config.query_heads // config.kv_heads,
            config.head_dim, config.score_scale, 0,
        )  # fmt: skip
        return heads if self._sinks is None else SinkHeads(*heads, self._sinks, 0)

    def _layer_kv(self, layer: int) -> LayerKV:
        config = self.config
        slots = self._cache.count_entries(config.head_dim) // (config.layers * config.kv_heads)
        return LayerKV(self._cache, slots, layer * config.kv_heads * slots)


class CpuProbe:
    """Implements ``LayerProbe`` for one request of a step.

    Attributes:
        parts: of the batch.
        part: number of the request's last part, which is probed.
        row: number of its first row in the batch.
        visible_at: where ``parts.visible`` says what it sees.
        queries: of all rows of the batch.
    """

    def __init__(
        self,
        attention: PartAttention,
        parts: AttentionParts,
        part: int,
        row: int,
        rows: int,
        plan: AttentionPlan,
        queries: Queries,
    ) -> None:
        config = attention.config
        self.query_heads, self.kv_heads = config.query_heads, config.kv_heads
        self.scale = config.score_scale
        self.parts, self.part, self.row, self.rows = parts, part, row, rows
        self.visible_at = int(parts.parts.reshape(-1, 2)[part, 1])
        self.queries = queries
        self.layer = self.first = 0
        self._attention = attention
        self._cells = np.zeros(config.layers, np.int32)
        if plan.cells is not None:
            counts = np.diff(plan.cells.indptr).reshape(config.layers, config.kv_heads)
            self._cells = counts[:, 0]

    def at(self, layer: int) -> "CpuProbe":
        """Look at another layer; return the probe itself."""
        self.layer = layer
        seen = int(self.parts.visible[self.visible_at + self.rows - 1])
        self.first = int(self._cells[layer]) + seen - self.rows
        return self

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        """See ``LayerProbe.masses``."""
        if not 0 < rows <= min(BLOCK, self.rows):
            raise ValueError(f"at most {min(BLOCK, self.rows)} rows can be probed, not {rows}")
        return self._attention.masses(self.layer, self, rows)

    def last_queries(self, rows: int) -> Float32Array:
        """See ``LayerProbe.last_queries``."""
        last: Float32Array = self._rows()[self.rows - rows :].copy()
        return last

    def mean_queries(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_queries``."""
        starts = np.arange(0, self.rows, block)
        counts = np.minimum(block, self.rows - starts).astype(np.float32)
        sums = np.add.reduceat(self._rows(), starts, axis=0)
        sums /= counts[:, None, None]
        means: Float32Array = sums.transpose(1, 0, 2)
        return means

    def mean_keys(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_keys``."""
        return self._attention.mean_keys(self.layer, self, block)

    def search(self, rule: TreeRule, stride: int) -> Int32Array:
        """See ``LayerProbe.search``."""
        return self._attention.search(self.layer, self, rule, stride)

    def _rows(self) -> Float32Array:
        """Return a view of the request's rotated queries: [rows, query_heads, head_dim]."""
        values, stride = self.queries
        dim = self._attention.config.head_dim
        own = values[self.row * stride : (self.row + self.rows) * stride].reshape(self.rows, stride)
        return own[:, : self.query_heads * dim].reshape(self.rows, self.query_heads, dim)


def _place_lists(
    config: ModelConfig, batch: ForwardBatch, plans: Sequence[tuple[int, AttentionPlan]]
) -> list[int]:
    """Return where each request's lists start, -1 for requests without, and how many there are.

    Those that listers fill come first.
    """
    places, count = [-1] * len(plans), 0
    rows = np.diff(batch.query_indptr)
    for place, (number, plan) in enumerate(plans):
        if plan.lister is not None:
            places[place] = count
            count += query_blocks(int(rows[number])) * config.query_heads
    for place, (number, plan) in enumerate(plans):
        if plan.selection is not None:
            places[place] = count
            count += int(rows[number]) * config.query_heads
    return [*places, count]


def _count_units(config: ModelConfig, rows: int, plan: AttentionPlan) -> int:
    """Return how many units of work a request has, as the kernel counts them."""
    group = config.query_heads // config.kv_heads
    if plan.selection is not None:
        return rows * config.query_heads
    if plan.lister is not None or group > BLOCK:
        group = 1
    return -(-rows // (BLOCK // group)) * (config.query_heads // group)


def _count_partials(config: ModelConfig, rows: int, plan: AttentionPlan) -> int:
    """Return how many segments of a request's quantised keys are computed on their own."""
    group = config.query_heads // config.kv_heads
    blocks = None if plan.cells is None else plan.cells.quantized
    if blocks is None or plan.lister is not None or rows * group > MAX_PARTIAL_ROWS:
        return 0
    return -(-int(blocks.counts.max(initial=0)) // SEGMENT)


def _joined_blocks(parts: Sequence[QuantizedBlocks | None], kernel: int) -> QuantizedTable:
    """Return the quantised blocks of a batch's parts as the kernels take them."""
    present = [blocks for blocks in parts if blocks is not None]
    tables = []
    for blocks, start in zip(present, _starts([each.cells for each in present]), strict=True):
        table = blocks.table.copy()
        table[:, CELLS_AT] += start
        tables.append(table.reshape(-1))
    firsts = iter(_starts([each.indptr for each in present]).tolist())
    before = _starts([each.table for each in present])
    return QuantizedTable(
        np.array([-1 if blocks is None else next(firsts) for blocks in parts], np.int32),
        np.concatenate([each.indptr + at for each, at in zip(present, before, strict=True)]).astype(
            np.int32
        ),
        np.concatenate(tables).astype(np.int32),
        np.concatenate([each.cells for each in present]),
        kernel,
    )


def _starts(arrays: Sequence[Int32Array]) -> Int64Array:
    """Return where each of some arrays starts when they follow one another."""
    return np.cumsum([0, *(len(array) for array in arrays[:-1])])


def _with_lists(parts: AttentionParts, lists: Sequence[SpanLists]) -> AttentionParts:
    """Return parts with the lists of all requests that have a lister, in their order."""
    starts = np.cumsum([0, *(len(span_list.spans) for span_list in lists)])
    indptr: list[Any] = [np.zeros(1, np.int32)]
    indptr += [
        span_list.indptr[1:] + start for span_list, start in zip(lists, starts, strict=False)
    ]
    spans = [span_list.spans.reshape(-1) for span_list in lists]
    return parts._replace(
        indptr=np.concatenate(indptr).astype(np.int32),
        spans=np.concatenate(spans).astype(np.int32, copy=False),
        pairs=np.zeros_like(parts.pairs),
    )


def _without(metadata: AttentionMetadata, requests: Sequence[int]) -> AttentionMetadata:
    """Return the attention of all other requests."""
    tiles = metadata.tiles[: metadata.tile_count]
    ends = np.append(tiles[1:, PARTIAL], metadata.partials)
    dense = ~np.isin(tiles[:, REQUEST], requests)
    kept, counts = tiles[dense], (ends - tiles[:, PARTIAL])[dense]
    partials = int(counts.sum()) if metadata.partials else 0
    if metadata.partials:
        kept[:, PARTIAL] = np.cumsum(counts) - counts
    return metadata._replace(tiles=kept, tile_count=len(kept), partials=partials)
