"""Sparse prefill on the CPU kernels: requests that attend to what their planners list.

Loaded when a step first needs it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.decoder_data import Workspace
from midfill.kernels.cpu.kv_cache import KVCache, LayerKV
from midfill.kernels.cpu.memory import aligned_zeros
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.sparse.attention import KeyLists, attend_lists
from midfill.kernels.cpu.sparse.probe import mean_keys, probe_masses
from midfill.kernels.cpu.sparse.requests import BLOCK, SparseRequest, scratch_size
from midfill.kernels.cpu.thread_pool import ThreadPool
from midfill.models.config import ModelConfig
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.sparse import SparsePlanner


class _Request(NamedTuple):
    """A request of a batch with its planner, and its rows as the kernels take them."""

    planner: SparsePlanner
    rows: SparseRequest


class SparseAttention:
    """The kernels of sparse attention, with the memory they need.

    Args:
        config: the model.
        pool: the threads.
        cache: the KV cache.
        stride: of the workspace's queries, see ``Queries``.
    """

    def __init__(self, config: ModelConfig, pool: ThreadPool, cache: KVCache, stride: int) -> None:
        self.config = config
        self._pool = pool
        self._cache = cache
        self._stride = stride
        threads = pool.threads
        self._scratch = aligned_zeros((threads, scratch_size(config.head_dim)), np.float32)
        self._numbers = aligned_zeros((threads, 4 * SEGMENT + BLOCK), np.int32)
        self._weights = self._states = aligned_zeros((threads, 0), np.float32)

    def attend(self, layer: int, request: _Request, workspace: Workspace) -> None:
        """Compute a request's attention in one layer, to the workspace."""
        probe = _CpuProbe(self, layer, request.rows, workspace.qkv)
        lists = request.planner.plan(probe)
        pairs: Int64Array = np.zeros(len(lists.indptr) - 1, np.int64)
        self._pool.run(
            attend_lists, self._layer_kv(layer), self._heads, self._queries(workspace.qkv),
            request.rows, KeyLists(lists.indptr, lists.spans.reshape(-1)), workspace.attended,
            self._scratch, self._numbers, pairs,
        )  # fmt: skip
        by_head = pairs.reshape(-1, self.config.query_heads).sum(axis=0)
        request.planner.record(layer, by_head)

    def masses(
        self, layer: int, request: SparseRequest, qkv: Float32Array
    ) -> tuple[Float32Array, Float32Array]:
        """See ``LayerProbe.masses``, of a request's rows, which are at most 64."""
        keys, heads = request.position + request.rows, self.config.query_heads
        segments = -(-keys // SEGMENT)
        width = segments * SEGMENT + BLOCK
        columns = aligned_zeros(heads * width, np.float32)
        diagonals = aligned_zeros(heads * width, np.float32)
        states = segments * request.rows * 2
        if self._states.shape[1] < states:
            threads = self._pool.threads
            self._states = aligned_zeros((threads, states), np.float32)
            self._weights = aligned_zeros((threads, states // 2 * SEGMENT), np.float32)
        self._pool.run(
            probe_masses, self._layer_kv(layer), self._heads, self._queries(qkv), request,
            columns, diagonals, width, self._scratch, self._weights, self._states,
        )  # fmt: skip
        by_key = columns.reshape(heads, width)[:, :keys]
        return by_key, diagonals.reshape(heads, width)[:, :keys][:, ::-1]

    def mean_keys(self, layer: int, request: SparseRequest, block: int) -> Float32Array:
        """See ``LayerProbe.mean_keys``."""
        if block not in (32, 64, 128):
            raise ValueError(f"blocks of keys have 32, 64 or 128 keys, not {block}")
        keys, dim = request.position + request.rows, self.config.head_dim
        segments = -(-keys // SEGMENT)
        shape = (self.config.kv_heads, segments * (SEGMENT // block), dim)
        means = aligned_zeros(shape, np.float32)
        self._pool.run(
            mean_keys, self._layer_kv(layer), self._heads, request, block, means.reshape(-1),
            self._scratch,
        )  # fmt: skip
        return means[:, : -(-keys // block)]

    def queries_of(self, request: SparseRequest, qkv: Float32Array) -> Float32Array:
        """Return a view of a request's rotated queries: [rows, query_heads, head_dim]."""
        rows, heads, dim = request.rows, self.config.query_heads, self.config.head_dim
        start = request.row * self._stride
        own = qkv[start : start + rows * self._stride].reshape(rows, self._stride)
        return own[:, : heads * dim].reshape(rows, heads, dim)

    @property
    def _heads(self) -> AttentionHeads:
        config = self.config
        return AttentionHeads(
            config.query_heads, config.kv_heads, config.query_heads // config.kv_heads,
            config.head_dim, config.score_scale, 0,
        )  # fmt: skip

    def _queries(self, qkv: Float32Array) -> Queries:
        return Queries(qkv, self._stride)

    def _layer_kv(self, layer: int) -> LayerKV:
        config = self.config
        slots = len(self._cache.keys) // (config.layers * config.kv_heads * config.head_dim)
        return LayerKV(self._cache, slots, layer * config.kv_heads * slots)


class _CpuProbe:
    """Implements ``LayerProbe``."""

    def __init__(
        self, attention: SparseAttention, layer: int, request: SparseRequest, qkv: Float32Array
    ) -> None:
        self.layer = layer
        self.first, self.rows = request.position, request.rows
        self.query_heads = attention.config.query_heads
        self.kv_heads = attention.config.kv_heads
        self.scale = attention.config.score_scale
        self._attention, self._request, self._qkv = attention, request, qkv

    def masses(self, rows: int) -> tuple[Float32Array, Float32Array]:
        """See ``LayerProbe.masses``."""
        before = self.rows - rows
        if not 0 < rows <= min(BLOCK, self.rows):
            raise ValueError(f"at most {min(BLOCK, self.rows)} rows can be probed, not {rows}")
        request = self._request
        last = SparseRequest(request.row + before, rows, request.position + before, request.slots)
        return self._attention.masses(self.layer, last, self._qkv)

    def last_queries(self, rows: int) -> Float32Array:
        """See ``LayerProbe.last_queries``."""
        queries = self._attention.queries_of(self._request, self._qkv)
        last: Float32Array = queries[self.rows - rows :].copy()
        return last

    def mean_queries(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_queries``."""
        queries = self._attention.queries_of(self._request, self._qkv)
        starts = np.arange(0, self.rows, block)
        counts = np.minimum(block, self.rows - starts).astype(np.float32)
        sums = np.add.reduceat(queries, starts, axis=0)
        sums /= counts[:, None, None]
        means: Float32Array = sums.transpose(1, 0, 2)
        return means

    def mean_keys(self, block: int) -> Float32Array:
        """See ``LayerProbe.mean_keys``."""
        return self._attention.mean_keys(self.layer, self._request, block)


def attend_listed(
    attention: SparseAttention, batch: ForwardBatch, workspace: Workspace
) -> Callable[[int], None]:
    """Return what computes the attention of the requests with a planner, in a layer.

    Args:
        attention: does it.
        batch: the step.
        workspace: of the step, large enough.
    """
    requests = _sparse_requests(batch)

    def attend(layer: int) -> None:
        for request in requests:
            attention.attend(layer, request, workspace)

    return attend


def _sparse_requests(batch: ForwardBatch) -> list[_Request]:
    found = []
    for number, planner in enumerate(batch.sparse):
        if planner is None:
            continue
        row, end = batch.query_indptr[number : number + 2].tolist()
        start, stop = batch.kv_indptr[number : number + 2].tolist()
        slots: Int32Array = batch.kv_slots[start:stop]
        found.append(
            _Request(planner, SparseRequest(row, end - row, len(slots) - (end - row), slots))
        )
    return found
