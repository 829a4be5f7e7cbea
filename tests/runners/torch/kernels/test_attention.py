"""Attention in Triton against one softmax per row and head, for any packed batch."""

import numpy as np
import pytest
import torch
from triton_device import TRITON_DEVICE, needs_triton

from midfill.runners.forward.batch import ForwardBatch

pytestmark = needs_triton
KV_HEADS, GROUP, SLOTS, SCALE = 2, 3, 300, 0.3
CASES = {
    "decodes": [(1, 1), (1, 30), (1, 200), (1, 65)],
    "a chunk after others' KV": [(30, 90)],
    "chunks beside decodes": [(23, 23), (1, 130), (2, 60), (1, 2)],
}


def batch_of(requests: list[tuple[int, int]], *, gathered: bool) -> ForwardBatch:
    """Requests given as (new rows, KV length); gathered: rows are any of their request's."""
    rng = np.random.default_rng(0)
    rows = sum(count for count, _ in requests)
    slots = [rng.permutation(SLOTS)[:length] for _, length in requests]
    visible = [np.sort(rng.permutation(length)[:count]) + 1 for count, length in requests]
    zeros = np.zeros(rows, np.int32)
    return ForwardBatch(
        token_ids=zeros,
        positions=zeros,
        write_slots=zeros,
        query_indptr=np.cumsum([0, *(count for count, _ in requests)]).astype(np.int32),
        kv_indptr=np.cumsum([0, *(length for _, length in requests)]).astype(np.int32),
        kv_slots=np.concatenate(slots).astype(np.int32),
        logit_rows=zeros[:0],
        visible_slots=np.concatenate(visible).astype(np.int32) if gathered else zeros[:0],
    )


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("processors", [1, 12])
@pytest.mark.parametrize("head_dim", [80, 256])
@pytest.mark.parametrize("case", CASES)
def test_every_row_sees_its_own_keys(
    case: str, head_dim: int, processors: int, window: int | None, gathered: bool
) -> None:
    from midfill.runners.torch.kernels.attention import attend_rows, rows_per_tile
    from midfill.runners.torch.kernels.step_inputs import InputBuffers

    batch = batch_of(CASES[case], gathered=gathered)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn((batch.rows, KV_HEADS * GROUP, head_dim), generator=generator)
    keys, values = (torch.randn((SLOTS, KV_HEADS, head_dim), generator=generator) for _ in range(2))
    buffers = InputBuffers(128, 1024, torch.device(TRITON_DEVICE))
    tile = 1 if batch.rows == batch.requests else rows_per_tile(GROUP)
    buffers.load(batch, batch.rows + 2, tile)
    padded = torch.nn.functional.pad(queries, (0, 0, 0, 0, 0, 2), value=float("nan"))
    on_device = [tensor.to(TRITON_DEVICE) for tensor in (padded, keys, values)]
    found = attend_rows(
        *on_device, buffers.inputs(batch.rows + 2, tile), window, SCALE, processors
    )[: batch.rows]
    seen, indptr = batch.slots_seen(), batch.query_indptr
    for request in range(batch.requests):
        slots = batch.kv_slots[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]
        for row in range(indptr[request], indptr[request + 1]):
            own = torch.from_numpy(slots[: seen[row]][-(window or SLOTS) :]).long()
            k, v = (part[own].repeat_interleave(GROUP, dim=1) for part in (keys, values))
            scores = torch.einsum("hd,khd->hk", queries[row], k) * SCALE
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
            torch.testing.assert_close(found[row].cpu(), expected, rtol=0, atol=1e-4)
