"""Requests whose first keys are a group with a temperature and a scale, on the CPU kernels.

Loaded when a step first needs it.
"""

from collections.abc import Callable

import numpy as np

from midfill.kernels.cpu.attention import Queries
from midfill.kernels.cpu.attention_metadata import AttentionHeads
from midfill.kernels.cpu.decoder_data import Workspace
from midfill.kernels.cpu.grouped.attention import GroupedRequest, attend_groups, scratch_size
from midfill.kernels.cpu.kv_cache import KVCache, LayerKV
from midfill.kernels.cpu.memory import aligned_zeros
from midfill.kernels.cpu.thread_pool import ThreadPool
from midfill.models.config import ModelConfig
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.groups import KeyGroup


class GroupedAttention:
    """The kernels of attention over two groups of keys, with the memory they need.

    Args:
        config: the model; no layer has a window.
        pool: the threads.
        cache: the KV cache.
        stride: of the workspace's queries, see ``Queries``.
    """

    def __init__(self, config: ModelConfig, pool: ThreadPool, cache: KVCache, stride: int) -> None:
        self._config, self._pool, self._cache, self._stride = config, pool, cache, stride
        self._scratch = aligned_zeros((pool.threads, scratch_size(config.head_dim)), np.float32)

    def attend(self, batch: ForwardBatch, workspace: Workspace) -> Callable[[int], None]:
        """Return what computes the attention of a step's requests with a group, in a layer.

        Args:
            batch: the step.
            workspace: of the step, large enough.
        """
        requests = [
            (_request(batch, number, group), group)
            for number, group in enumerate(batch.groups)
            if group is not None
        ]

        def attend(layer: int) -> None:
            for request, group in requests:
                self._attend(layer, request, group, workspace)

        return attend

    def _attend(
        self, layer: int, request: GroupedRequest, group: KeyGroup, workspace: Workspace
    ) -> None:
        config = self._config
        slots = len(self._cache.keys) // (config.layers * config.kv_heads * config.head_dim)
        kv = LayerKV(self._cache, slots, layer * config.kv_heads * slots)
        self._pool.run(
            attend_groups, kv, self._heads(1.0), self._heads(group.temperature), group.power,
            Queries(workspace.qkv, self._stride), request, workspace.attended, self._scratch,
        )  # fmt: skip

    def _heads(self, temperature: float) -> AttentionHeads:
        config = self._config
        return AttentionHeads(
            config.query_heads, config.kv_heads, config.query_heads // config.kv_heads,
            config.head_dim, config.score_scale / temperature, 0,
        )  # fmt: skip


def _request(batch: ForwardBatch, number: int, group: KeyGroup) -> GroupedRequest:
    row, end = batch.query_indptr[number : number + 2].tolist()
    start, stop = batch.kv_indptr[number : number + 2].tolist()
    return GroupedRequest(row, end - row, group.keys, batch.kv_slots[start:stop])
