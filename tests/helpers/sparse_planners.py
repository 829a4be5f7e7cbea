"""Planners of sparse prefill whose lists are known beforehand, and what they were shown."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from midfill.runners.forward.attention import (
    QUERY_BLOCK,
    AttentionPlan,
    LayerProbe,
    SpanLists,
    query_blocks,
)
from midfill.runners.forward.batch import ForwardBatch


def everything(probe: LayerProbe) -> SpanLists:
    return SpanLists.of_everything(probe.query_heads, probe.first, probe.rows)


def scattered(probe: LayerProbe) -> SpanLists:
    """Single keys and runs of any length, other ones in each layer, block and head."""
    rng = np.random.default_rng([probe.layer, probe.first])
    blocks = query_blocks(probe.rows)
    keys = probe.first + probe.rows
    listed = rng.random((blocks, probe.query_heads, keys)) < 0.2
    listed |= np.repeat(rng.random((blocks, probe.query_heads, keys // 8 + 1)) < 0.2, 8, 2)[
        :, :, :keys
    ]
    for block in range(blocks):
        start = probe.first + block * QUERY_BLOCK
        listed[block, :, start : start + QUERY_BLOCK] = True
        listed[block, :, start + QUERY_BLOCK :] = False
    return SpanLists.from_mask(listed)


@dataclass
class MadePlanner:
    """Plans by a function, and keeps what was computed and what a look at the probe gave."""

    choose: Callable[[LayerProbe], SpanLists] = everything
    look: Callable[[LayerProbe], object] = lambda probe: None
    seen: list[object] = field(default_factory=list)
    lists: list[SpanLists] = field(default_factory=list)
    pairs: dict[int, np.ndarray] = field(default_factory=dict)

    def plan(self, probe: LayerProbe) -> SpanLists:
        self.seen.append(self.look(probe))
        self.lists.append(self.choose(probe))
        return self.lists[-1]

    def record(self, layer: int, pairs: np.ndarray) -> None:
        self.pairs[layer] = pairs


def with_planners(batch: ForwardBatch, *planners: MadePlanner | None) -> ForwardBatch:
    plans = tuple(one and AttentionPlan(lister=one) for one in planners)
    return dataclasses.replace(batch, attention=plans)
