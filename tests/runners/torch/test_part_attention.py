"""Attention over cells in torch against a loop over single queries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_attention import naive_attention, uniform_ragged_index
from sparse_planners import MadePlanner, scattered

from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.runners.forward.attention import AttentionPlan, KeyPart
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.dense_attention import attend, prepare_metadata
from midfill.runners.torch.part_attention import attend_planned, prepare_plans

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LAYERS, KV_HEADS, GROUP, HEAD_DIM, SLOTS, SCALE = 2, 2, 3, 8, 60, 0.3


def random_index(rng: np.random.Generator, *, terms: bool) -> RaggedIndex:
    counts = rng.integers(0, 20, LAYERS * KV_HEADS)
    cells = [rng.permutation(LAYERS * KV_HEADS * SLOTS)[:count] for count in counts]
    factors = rng.uniform(0.5, 2, (3, counts.sum())).astype(np.float32)
    return RaggedIndex(
        np.concatenate(cells).astype(np.int32),
        np.cumsum([0, *counts]).astype(np.int32),
        KeyTerms(*factors) if terms else None,
    )


def packed(
    requests: list[tuple[int, int]],
    indices: tuple[RaggedIndex | None, ...],
    *,
    gathered: bool = False,
) -> ForwardBatch:
    """requests: (new rows, slots) each; gathered rows are any of them, not the last ones."""
    rng = np.random.default_rng(len(requests))
    rows = sum(count for count, _ in requests)
    empty = np.zeros(rows, np.int32)
    slots = [rng.permutation(SLOTS)[:length] for _, length in requests]
    visible = [np.sort(rng.permutation(length)[:count]) + 1 for count, length in requests]
    return ForwardBatch(
        token_ids=empty,
        positions=empty,
        write_slots=empty,
        query_indptr=np.cumsum([0, *(count for count, _ in requests)]).astype(np.int32),
        kv_indptr=np.cumsum([0, *(length for _, length in requests)]).astype(np.int32),
        kv_slots=np.concatenate(slots).astype(np.int32),
        logit_rows=empty,
        attention=tuple(one and AttentionPlan(one) for one in indices),
        visible_slots=np.concatenate(visible).astype(np.int32) if gathered else empty[:0],
    )


def attended(
    batch: ForwardBatch, layer: int, window: int | None, tensors: list[torch.Tensor], device: str
) -> torch.Tensor:
    """Every row's attention, computed on `device`, returned on the CPU."""
    queries, keys, values = tensors = [tensor.to(device) for tensor in tensors]
    metadata = prepare_metadata(batch, {window}, queries.device)
    outputs = attend(queries, keys[layer], values[layer], metadata, window, SCALE)
    for request in prepare_plans(batch, keys, values):
        outputs[request.rows] = attend_planned(*tensors, request, layer, window, SCALE)
    return outputs.cpu()


def random_tensors(rows: int, seed: int) -> list[torch.Tensor]:
    """Queries, keys, values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, KV_HEADS * GROUP, HEAD_DIM), *[(LAYERS, SLOTS, KV_HEADS, HEAD_DIM)] * 2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


request_kinds = st.tuples(
    st.integers(1, 6),
    st.integers(0, 20),
    st.sampled_from("-ct"),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from("-ct"), st.booleans()), max_size=2),
    st.booleans(),
)
"""New rows, slots before, cells ("c", "t" with terms), parts before: slots, cells, whether rows see
different numbers of them; whether keys are listed."""


def plan(rng: np.random.Generator, rows: int, kind: tuple, window: int | None) -> AttentionPlan:
    _, _, cells, parts, listed = kind
    made = [
        KeyPart(
            rng.permutation(SLOTS)[:count].astype(np.int32),
            None if own == "-" else random_index(rng, terms=own == "t"),
            np.sort(rng.integers(0, count + 1, rows)).astype(np.int32) if varies else None,
            temperature=float(rng.uniform(0.5, 1.5)),
            scale=float(rng.uniform(0.5, 1.5)),
        )
        for count, own, varies in parts
    ]
    index = None
    if cells != "-" and listed:
        heads = LAYERS * KV_HEADS
        slots = rng.permutation(SLOTS)[: rng.integers(1, 9)].astype(np.int32)
        index = uniform_ragged_index(slots, heads, SLOTS)
    elif cells != "-":
        index = random_index(rng, terms=cells == "t")
    lister = MadePlanner(scattered) if listed else None
    return AttentionPlan(index, lister, tuple(made) if window is None else ())


@pytest.mark.parametrize("device", DEVICES)
@given(
    st.lists(request_kinds, min_size=1, max_size=4),
    st.none() | st.integers(1, 12),
    st.integers(0, LAYERS - 1),
    st.integers(0, 99),
    st.booleans(),
)
@settings(deadline=None)
def test_rows_attend_to_what_their_plan_says(
    device: str, kinds: list[tuple], window: int | None, layer: int, seed: int, gathered: bool
) -> None:
    rng = np.random.default_rng(seed)
    gathered = gathered and not any(kind[4] for kind in kinds)  # lists are causal by rows in order
    batch = packed([(kind[0], kind[0] + kind[1]) for kind in kinds], (), gathered=gathered)
    plans = tuple(plan(rng, kind[0], kind, window) for kind in kinds)
    batch = replace(batch, attention=plans)
    tensors = random_tensors(batch.rows, seed)
    actual = attended(batch, layer, window, tensors, device)
    expected = naive_attention(batch, layer, window, SCALE, *tensors)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_all_cells_are_the_slots_themselves(device: str) -> None:
    batch = packed([(4, 30)], ())
    tensors = random_tensors(4, 0)
    index = uniform_ragged_index(batch.kv_slots[:20], LAYERS * KV_HEADS, SLOTS)
    rest = replace(
        batch,
        kv_slots=batch.kv_slots[20:],
        kv_indptr=np.array([0, 10], np.int32),
        attention=(AttentionPlan(index),),
    )
    dense = attended(batch, 1, None, tensors, device)
    torch.testing.assert_close(attended(rest, 1, None, tensors, device), dense, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_key_is_seen_and_not_hidden(device: str) -> None:
    batch = packed([(2, 9)], ())
    queries, keys, values = random_tensors(2, 0)
    keys[1, batch.kv_slots[0]] = torch.nan
    planned = replace(batch, attention=(AttentionPlan(),))
    found = attended(planned, 1, None, [queries, keys, values], device)
    assert found.isnan().all()
