"""Passes that stop before each layer's attention, since some requests have one of their own.

There, other kernels compute these requests. All other rows of the step, decodes of other requests
among them, then go through dense attention as always.
"""

from collections.abc import Callable, Sequence

import numpy as np

from midfill.arrays import BoolArray
from midfill.kernels.cpu.attention_metadata import PARTIAL, REQUEST, AttentionMetadata
from midfill.kernels.cpu.decoder_data import Batch, Stages
from midfill.models.config import ModelConfig


def run_special_layers(
    config: ModelConfig,
    special: BoolArray,
    attend: Sequence[Callable[[int], None]],
    prepared: Batch,
    stages: Stages,
    execute: Callable[[Batch, Stages], None],
) -> None:
    """Run a part of the forward pass in which some requests have an attention of their own.

    Layers with a sliding window are computed densely.

    Args:
        config: the model.
        special: [requests] bool, which requests these are.
        attend: compute their attention in a layer, to the workspace.
        prepared: the batch as the kernels take it, all of it to be computed densely.
        stages: what to run; at least one layer.
        execute: runs a part of the forward pass over a prepared batch.
    """
    others = prepared._replace(attention=_without(prepared.attention, special))
    first, end = stages.first_layer, stages.end_layer
    execute(prepared, Stages(stages.embed, first, first, False, project=True))
    for layer in range(first, end):
        last = layer + 1 == end
        one = Stages(False, layer, layer + 1, last and stages.logits, True, not last)
        if config.window_of(layer) is not None:
            execute(prepared, one)
            continue
        for compute in attend:
            compute(layer)
        execute(others, one)


def _without(metadata: AttentionMetadata, special: BoolArray) -> AttentionMetadata:
    """Return the attention of the other requests."""
    tiles = metadata.tiles[: metadata.tile_count]
    ends = np.append(tiles[1:, PARTIAL], metadata.partials)
    dense = ~special[tiles[:, REQUEST]]
    kept, counts = tiles[dense], (ends - tiles[:, PARTIAL])[dense]
    partials = int(counts.sum()) if metadata.partials else 0
    if metadata.partials:
        kept[:, PARTIAL] = np.cumsum(counts) - counts
    return metadata._replace(tiles=kept, tile_count=len(kept), partials=partials)
