"""Attention over cells in torch against a loop over single queries."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.kv.ragged import KeyTerms, RaggedIndex, uniform_ragged_index
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.dense_attention import attend, prepare_metadata
from midfill.runners.torch.ragged_attention import attend_ragged, prepare_ragged

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
        ragged=indices,
        visible_slots=np.concatenate(visible).astype(np.int32) if gathered else empty[:0],
    )


def naive(
    batch: ForwardBatch,
    layer: int,
    window: int | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    outputs = torch.zeros_like(queries)
    for request, index in enumerate(batch.ragged):
        first, end = batch.query_indptr[request : request + 2]
        slots = batch.kv_slots[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]
        for row in range(first, end):
            count = len(slots) - (end - row) + 1
            own = slots[: batch.visible_slots[row] if len(batch.visible_slots) else count]
            for head in range(KV_HEADS * GROUP):
                kv_head = head // GROUP
                seen = (layer * KV_HEADS + kv_head) * SLOTS + own
                terms = np.tile([[1.0], [0.0], [1.0]], len(own))
                if index is not None:
                    place = layer * KV_HEADS + kv_head
                    part = slice(index.indptr[place], index.indptr[place + 1])
                    seen = np.concatenate((index.cells[part], seen))
                    given_terms = index.terms or KeyTerms.neutral(len(index.cells))
                    mine = [term[part] for term in vars(given_terms).values()]
                    terms = np.concatenate((np.stack(mine), terms), axis=1)
                if window is not None:
                    seen, terms = seen[-window:], terms[:, -window:]
                factor, bias, weight = torch.from_numpy(terms).float()
                k, v = (
                    cache.transpose(1, 2).reshape(-1, HEAD_DIM)[seen] for cache in (keys, values)
                )
                scores = k @ queries[row, head] * SCALE * factor + bias
                weighted = scores.softmax(0) * weight
                outputs[row, head] = weighted @ v
    return outputs


def attended(
    batch: ForwardBatch, layer: int, window: int | None, tensors: list[torch.Tensor]
) -> torch.Tensor:
    queries, keys, values = tensors
    metadata = prepare_metadata(batch, {window}, torch.device("cpu"))
    outputs = attend(queries, keys[layer], values[layer], metadata, window, SCALE)
    for request in prepare_ragged(batch, keys.shape, torch.device("cpu")):
        outputs[request.rows] = attend_ragged(*tensors, request, layer, window, SCALE)
    return outputs


def random_tensors(rows: int, seed: int) -> list[torch.Tensor]:
    """Queries, keys, values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, KV_HEADS * GROUP, HEAD_DIM), *[(LAYERS, SLOTS, KV_HEADS, HEAD_DIM)] * 2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


request_kinds = st.tuples(st.integers(1, 6), st.integers(0, 20), st.sampled_from("-ct"))


@given(
    st.lists(request_kinds, min_size=1, max_size=4),
    st.none() | st.integers(1, 12),
    st.integers(0, LAYERS - 1),
    st.integers(0, 99),
    st.booleans(),
)
@settings(deadline=None)
def test_each_head_sees_its_cells_and_then_the_slots(
    kinds: list[tuple[int, int, str]], window: int | None, layer: int, seed: int, gathered: bool
) -> None:
    rng = np.random.default_rng(seed)
    indices = [None if kind == "-" else random_index(rng, terms=kind == "t") for *_, kind in kinds]
    batch = packed(
        [(rows, rows + before) for rows, before, _ in kinds], tuple(indices), gathered=gathered
    )
    tensors = random_tensors(batch.rows, seed)
    actual = attended(batch, layer, window, tensors)
    torch.testing.assert_close(actual, naive(batch, layer, window, *tensors), rtol=0, atol=1e-5)


def test_all_cells_are_the_slots_themselves() -> None:
    batch = packed([(4, 30)], ())
    tensors = random_tensors(4, 0)
    index = uniform_ragged_index(batch.kv_slots[:20], LAYERS * KV_HEADS, SLOTS)
    rest = ForwardBatch(
        **vars(batch)
        | {"kv_slots": batch.kv_slots[20:], "kv_indptr": np.array([0, 10], np.int32)}
        | {"ragged": (index,)}
    )
    dense = attended(batch, 1, None, tensors)
    torch.testing.assert_close(attended(rest, 1, None, tensors), dense, rtol=0, atol=1e-6)
