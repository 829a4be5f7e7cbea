"""Attention of requests with a plan of their own (``runners.forward.attention``), in torch.

The plain form, one request at a time: what the CPU kernels agree with, and what runs on CUDA. All
scores are computed, and those of keys that are not listed are masked, so nothing is saved here.
Quantised blocks are decoded once and kept as what they stand for, which saves no memory either.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from midfill.arrays import Float32Array, Int32Array
from midfill.kv.quantized import QuantizedBlocks, cell_data
from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.runners.forward.attention import (
    QUERY_BLOCK,
    AttentionPlan,
    KeyLister,
    query_blocks,
)
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.page_selection import PageSelection, all_pages, reads_all
from midfill.runners.forward.tree_search import TreeRule
from midfill.runners.torch.page_selection import mask_unchosen


@dataclass(frozen=True)
class PreparedCells:
    """A RaggedIndex on the device.

    Attributes:
        cells: [layers, kv_heads, most] int64, padded with cell 0.
        kept: [layers, kv_heads, 1] int64, how many are cells.
        terms: [3, layers, kv_heads, most] float32: score factors, score biases, value factors.
    """

    cells: torch.Tensor
    kept: torch.Tensor
    terms: torch.Tensor


@dataclass(frozen=True)
class DecodedBlocks:
    """What quantised blocks stand for.

    Attributes:
        keys, values: [layers, kv_heads, most, head_dim], padded with zeros.
        counts: [layers, kv_heads, 1] int64, how many of them there are.
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class PreparedPart:
    """One part of a request's keys.

    Attributes:
        slots: [n] int64, after the cells.
        visible: [queries, 1] int64, how many of the slots each row sees.
        cells: before them; None if there are none.
        blocks: before these; None if there are none.
        temperature: divides the scores.
        power: that the sum of their exponentials is raised to.
    """

    slots: torch.Tensor
    visible: torch.Tensor
    cells: PreparedCells | None
    blocks: DecodedBlocks | None
    temperature: float
    power: float


@dataclass(frozen=True)
class PlannedRequest:
    """The rows of a request with a plan, and what they attend to.

    Attributes:
        rows: [queries] int64, rows of the packed batch.
        parts: the last one is that of the request's own slots.
        lister, selection: choose among the last part's keys; None reads all.
    """

    rows: torch.Tensor
    parts: tuple[PreparedPart, ...]
    lister: KeyLister | None
    selection: PageSelection | None


def prepare_plans(
    batch: ForwardBatch, keys: torch.Tensor, values: torch.Tensor
) -> tuple[PlannedRequest, ...]:
    """Return the batch's requests with a plan, once for all layers.

    Args:
        batch: the step.
        keys, values: the KV cache: [layers, slots, kv_heads, head_dim].
    """
    seen = batch.slots_seen()
    return tuple(
        _prepare(batch, number, plan, seen, keys, values) for number, plan in batch.plans()
    )


def attend_planned(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    request: PlannedRequest,
    layer: int,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a request's attention in one layer.

    Args:
        queries: [rows of the batch, query_heads, head_dim].
        keys, values: the whole KV cache [layers, slots, kv_heads, head_dim], the batch's rows
            written.
        request: from ``prepare_plans``.
        layer: which one.
        window: how many of its last keys a query sees, its own included; None is all. With a
            window, nothing else chooses.
        scale: factor of q.k.
        sinks: [query_heads], the layer's; None if it has none.

    Returns:
        [queries, query_heads, head_dim].
    """
    q = queries[request.rows].float()
    rows, heads, head_dim = q.shape
    q = q.view(rows, keys.shape[2], -1, head_dim)
    last = _Choosing(request.lister, request.selection) if window is None else _ALL
    attended, masses = [], []
    for number, part in enumerate(request.parts):
        chooses = last if number + 1 == len(request.parts) else _ALL
        scores, weight, v = _scores(q, keys, values, part, layer, window, scale, chooses)
        sees_none = scores.isneginf().all(-1, keepdim=True)
        weights = scores.softmax(-1).masked_fill(sees_none, 0.0)
        attended.append(torch.einsum("hgrk,hkd->hgrd", weights * weight[:, None, None], v))
        masses.append(part.power * scores.logsumexp(-1))
    if len(attended) == 1:
        mixed = attended[0]
    else:
        shares = torch.stack(masses).softmax(0)[..., None]
        mixed = (shares * torch.stack(attended)).sum(0)
    if sinks is not None:
        whole = torch.stack(masses).logsumexp(0)
        mixed = mixed * torch.sigmoid(whole - sinks.view(whole.shape[0], -1, 1))[..., None]
    return mixed.permute(2, 0, 1, 3).reshape(rows, heads, head_dim).to(queries.dtype)


@dataclass(frozen=True)
class _Choosing:
    """What chooses among a part's keys; nothing reads all."""

    lister: KeyLister | None = None
    selection: PageSelection | None = None


_ALL = _Choosing()


def _scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: PreparedPart,
    layer: int,
    window: int | None,
    scale: float,
    choosing: _Choosing,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a part's scores [kv_heads, group, rows, keys], -inf for keys that a row doesn't see,
    its value factors [kv_heads, keys], and its values [kv_heads, keys, head_dim]."""
    k, v = (_gather(cache, layer, part) for cache in (keys, values))
    kv_heads, count = k.shape[:2]
    scores = torch.einsum("rhgd,hkd->hgrk", q, k) * (scale / part.temperature)
    weight = torch.ones(kv_heads, count, device=k.device)
    kept = torch.zeros(kv_heads, 1, dtype=torch.int64, device=k.device)
    most = 0
    if part.cells is not None:
        kept, most = part.cells.kept[layer], part.cells.cells.shape[2]
        factor, bias, weight = (
            _padded(term, count - most, fill)
            for term, fill in zip(part.cells.terms[:, layer], (1.0, 0.0, 1.0), strict=True)
        )
        scores = scores * factor[:, None, None] + bias[:, None, None]
    seen = _visible(part.visible, most, count - most, kept, window)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if part.blocks is not None:
        scores, weight, v = _with_blocks(scores, weight, v, q, part, layer, scale)
    if choosing.lister is not None:
        scores = _mask_unlisted(scores, q, k, kept, most, layer, scale, choosing.lister)
    if choosing.selection is not None:
        scores = mask_unchosen(scores, q, k, kept, most, part.visible, layer, choosing.selection)
    return scores, weight, v


def _with_blocks(
    scores: torch.Tensor,
    weight: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    part: PreparedPart,
    layer: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``_scores`` returns, with that of the quantised keys behind it."""
    blocks = part.blocks
    assert blocks is not None
    added = torch.einsum("rhgd,hkd->hgrk", q, blocks.keys[layer]) * (scale / part.temperature)
    missing = torch.arange(added.shape[-1], device=v.device) >= blocks.counts[layer]
    added = added.masked_fill(missing[:, None, None], -torch.inf)
    ones = weight.new_ones(len(weight), added.shape[-1])
    return (
        torch.cat((scores, added), dim=-1),
        torch.cat((weight, ones), dim=-1),
        torch.cat((v, blocks.values[layer]), dim=1),
    )


def _mask_unlisted(
    scores: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    kept: torch.Tensor,
    most: int,
    layer: int,
    scale: float,
    lister: KeyLister,
) -> torch.Tensor:
    """Have a lister choose, and return the scores with those of all other keys at -inf."""
    # Heads of a layer have as many cells each, so a key's number is its place.
    rows, head_dim = q.shape[0], q.shape[-1]
    probe = TorchProbe(layer, q.reshape(rows, -1, head_dim), k.transpose(0, 1), scale)
    lists = lister.plan(probe)
    mask = torch.from_numpy(lists.mask(rows, k.shape[1])).to(scores.device)
    blocks = np.diff(lists.indptr).reshape(-1, probe.query_heads)
    lengths = np.add.reduceat(
        np.append(lists.spans[:, 1] - lists.spans[:, 0], 0), lists.indptr[:-1]
    ).reshape(blocks.shape)
    counts = np.minimum(QUERY_BLOCK, rows - np.arange(len(blocks)) * QUERY_BLOCK)
    lister.record(layer, (lengths * counts[:, None]).sum(axis=0).astype(np.int64))
    return scores.masked_fill(~mask.view(scores.shape), -torch.inf)


def _gather(cache: torch.Tensor, layer: int, part: PreparedPart) -> torch.Tensor:
    """Return a part's entries: [kv_heads, cells and slots, head_dim] float32."""
    own = cache[layer, part.slots].transpose(0, 1)
    if part.cells is None:
        return own.float()
    found = cache[cell_places(part.cells.cells[layer], cache.shape)]
    return torch.cat((found, own), dim=1).float()


def cell_places(
    cells: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the layers, slots and heads of cells in a cache [layers, slots, kv_heads, ...]."""
    _, slots, heads, *_ = shape
    row = cells // slots
    return row // heads, cells % slots, row % heads


def _padded(term: torch.Tensor, own: int, fill: float) -> torch.Tensor:
    return torch.cat((term, term.new_full((len(term), own), fill)), dim=1)


def _visible(
    slots_seen: torch.Tensor, most: int, own: int, kept: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return which keys each row sees, as bool [kv_heads, rows, keys]."""
    column = torch.arange(most + own, device=kept.device)
    is_cell = column < most
    # A head's keys are numbered without its padding.
    number = torch.where(is_cell, column, kept + column - most)
    exists = ~is_cell | (column < kept)
    row = kept[:, None] + slots_seen - 1
    seen = exists[:, None] & (number[:, None] <= row)
    return seen if window is None else seen & (number[:, None] > row - window)


def _prepare(
    batch: ForwardBatch,
    number: int,
    plan: AttentionPlan,
    seen: Int32Array,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> PlannedRequest:
    kv_heads, device = keys.shape[2], keys.device
    rows = np.arange(batch.query_indptr[number], batch.query_indptr[number + 1])
    own = batch.kv_slots[batch.kv_indptr[number] : batch.kv_indptr[number + 1]]

    def indices(array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(array).to(device, torch.int64)

    def cells(index: RaggedIndex | None) -> PreparedCells | None:
        return None if index is None else _prepare_cells(index, kv_heads, device)

    def blocks(index: RaggedIndex | None) -> DecodedBlocks | None:
        quantized = None if index is None else index.quantized
        return None if quantized is None else _decode_blocks(quantized, keys, values)

    parts = []
    for part in plan.parts:
        visible = np.full(len(rows), len(part.slots)) if part.visible is None else part.visible
        parts.append(
            PreparedPart(
                indices(part.slots),
                indices(visible)[:, None],
                cells(part.cells),
                blocks(part.cells),
                part.temperature,
                part.power,
            )
        )
    own_part = PreparedPart(
        indices(own), indices(seen[rows])[:, None], cells(plan.cells), blocks(plan.cells), 1.0, 1.0
    )
    return PlannedRequest(indices(rows), (*parts, own_part), plan.lister, plan.selection)


def _prepare_cells(index: RaggedIndex, kv_heads: int, device: torch.device) -> PreparedCells:
    counts = np.diff(index.indptr)
    terms = index.terms or KeyTerms.neutral(len(index.cells))
    arrays = (index.cells, terms.score_factor, terms.score_bias, terms.value_factor)
    padded = [np.zeros((len(counts), index.most), array.dtype) for array in arrays]
    for target, array in zip(padded, arrays, strict=True):
        for row, (start, count) in enumerate(zip(index.indptr, counts, strict=False)):
            target[row, :count] = array[start : start + count]
    # Heads may have no exact key, only quantised ones.
    shape = (len(counts) // kv_heads, kv_heads, index.most)
    return PreparedCells(
        cells=torch.from_numpy(padded[0].reshape(shape)).to(device, torch.int64),
        kept=torch.from_numpy(counts.reshape(-1, kv_heads, 1)).to(device, torch.int64),
        terms=torch.from_numpy(np.stack(padded[1:]).reshape(3, *shape)).to(device),
    )


_DECODED: WeakKeyDictionary[QuantizedBlocks, DecodedBlocks] = WeakKeyDictionary()
"""Blocks never change, but for the cells that they are in."""


def _decode_blocks(
    blocks: QuantizedBlocks, keys: torch.Tensor, values: torch.Tensor
) -> DecodedBlocks:
    found = _DECODED.get(blocks)
    if found is None:
        layers, _, kv_heads, head_dim = keys.shape
        counts = blocks.counts
        shape = (2, len(counts), int(counts.max(initial=0)), head_dim)
        decoded = np.zeros(shape, np.float32)
        for head, count in enumerate(counts):
            every = [_decode_block(blocks, number, keys, values) for number in blocks.numbers(head)]
            if every:
                decoded[:, head, :count] = np.concatenate(every, axis=1)
        both = torch.from_numpy(decoded).to(keys.device)
        both = both.view(2, layers, kv_heads, shape[2], head_dim)
        held = torch.from_numpy(counts).to(keys.device, torch.int64).view(layers, kv_heads, 1)
        found = _DECODED[blocks] = DecodedBlocks(both[0], both[1], held)
    return found


def _decode_block(
    blocks: QuantizedBlocks, number: int, keys: torch.Tensor, values: torch.Tensor
) -> Float32Array:
    """Return the keys and values of a block: float32 [2, tokens, head_dim]."""
    cells = torch.from_numpy(blocks.cells_of(number)).to(keys.device, torch.int64)
    place = cell_places(cells, keys.shape)
    data = [cache[place].contiguous().view(torch.uint8).cpu().numpy() for cache in (keys, values)]
    return np.stack(blocks.block(number, cell_data(*data)).decode(keys.shape[-1]))


class TorchProbe:
    """Implements ``runners.forward.attention.LayerProbe``.

    Args:
        layer: which one.
        queries: [rows, query_heads, head_dim] float32.
        keys: [keys, kv_heads, head_dim] float32, those of the rows last.
        scale: factor of q.k.
    """

    def __init__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        self.layer = layer
        self.rows, self.query_heads = queries.shape[:2]
        self.kv_heads = keys.shape[1]
        self.first = len(keys) - self.rows
        self.scale = scale
        self._queries, self._keys = queries, keys

    def scores(self, rows: int) -> torch.Tensor:
        """Return the scores of the last rows with all keys, [query_heads, rows, keys]; causal."""
        keys = self._keys.repeat_interleave(self.query_heads // self.kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self._queries[self.rows - rows :], keys) * self.scale
        count = len(keys)
        later = torch.ones(rows, count, dtype=torch.bool, device=scores.device)
        return scores.masked_fill(later.triu(count - rows + 1), -torch.inf)

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        """See ``LayerProbe.masses``."""
        weights = self.scores(rows).softmax(dim=-1).cpu().numpy()
        count = weights.shape[2]
        diagonals = np.zeros((self.query_heads, count), np.float32)
        for row in range(rows):
            seen = count - rows + row + 1
            diagonals[:, :seen] += weights[:, row, :seen][:, ::-1]
        columns: Float32Array = weights.sum(axis=1)
        return columns, diagonals

    def last_queries(self, rows: int) -> Float32Array:
        """See ``LayerProbe.last_queries``."""
        queries: Float32Array = self._queries[self.rows - rows :].cpu().numpy()
        return queries

    def mean_queries(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_queries``."""
        return _block_means(self._queries, block)

    def mean_keys(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_keys``."""
        return _block_means(self._keys, block)

    def search(self, rule: TreeRule, stride: int) -> Int32Array:
        """See ``LayerProbe.search``."""
        queries, keys = self._queries.cpu().numpy(), self._keys.cpu().numpy()
        blocks, group = query_blocks(self.rows), self.query_heads // self.kv_heads
        chosen = np.zeros((blocks, self.query_heads, rule.width), np.int32)
        for block in range(blocks):
            first = block * QUERY_BLOCK
            rows = queries[first : first + QUERY_BLOCK : stride]
            seen = self.first + first + 1
            for head in range(self.query_heads):
                if reads_all(rule, seen):
                    chosen[block, head] = all_pages(rule)
                else:
                    own = keys[:seen, head // group]
                    chosen[block, head] = rule.choose_together(rows[:, head], own)
        return chosen


def _block_means(vectors: torch.Tensor, block: int) -> Float32Array:
    """Return the means of blocks of [n, heads, head_dim]: [heads, blocks, head_dim]."""
    starts = range(0, len(vectors), block)
    means = [vectors[start : start + block].mean(dim=0) for start in starts]
    stacked: Float32Array = torch.stack(means, dim=1).cpu().numpy()
    return stacked
