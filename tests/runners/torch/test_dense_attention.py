"""Dense attention over slots against a loop over single queries, for any packed batch."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.dense_attention import Window, attend, prepare_metadata

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
KV_HEADS, GROUP, HEAD_DIM, SLOTS, SCALE = 2, 3, 8, 200, 0.3


@dataclass
class Problem:
    """A batch of requests given as (new rows, KV length), over a random KV cache."""

    batch: ForwardBatch
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def problem(requests: list[tuple[int, int]], seed: int = 0, *, gathered: bool = False) -> Problem:
    """gathered: rows are any of their request's, so that each sees as many slots as it happens."""
    generator = torch.Generator().manual_seed(seed)
    scattered = np.random.default_rng(seed)
    query_indptr = np.cumsum([0, *(rows for rows, _ in requests)])
    kv_indptr = np.cumsum([0, *(length for _, length in requests)])
    slots = [scattered.permutation(SLOTS)[:length] for _, length in requests]
    rows = int(query_indptr[-1])
    empty = np.zeros(rows, np.int32)
    visible = [np.sort(scattered.permutation(length)[:count]) + 1 for count, length in requests]
    batch = ForwardBatch(
        token_ids=empty,
        positions=empty,
        write_slots=empty,
        query_indptr=query_indptr.astype(np.int32),
        kv_indptr=kv_indptr.astype(np.int32),
        kv_slots=np.concatenate([np.zeros(0), *slots]).astype(np.int32),
        logit_rows=empty,
        visible_slots=np.concatenate([empty[:0], *visible]).astype(np.int32)
        if gathered
        else empty[:0],
    )
    return Problem(
        batch,
        torch.randn((rows, KV_HEADS * GROUP, HEAD_DIM), generator=generator),
        torch.randn((SLOTS, KV_HEADS, HEAD_DIM), generator=generator),
        torch.randn((SLOTS, KV_HEADS, HEAD_DIM), generator=generator),
    )


def naive(case: Problem, window: Window, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """One softmax for every row and head, over the slots that ForwardBatch says it sees.

    A sink is one more score.
    """
    batch, outputs = case.batch, torch.zeros_like(case.queries)
    for request in range(batch.requests):
        first, end = batch.query_indptr[request : request + 2]
        slots = batch.kv_slots[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]
        for row in range(first, end):
            count = len(slots) - (end - first) + (row - first) + 1
            seen = slots[: batch.visible_slots[row] if len(batch.visible_slots) else count]
            seen = torch.from_numpy(seen if window is None else seen[-window:]).long()
            for head in range(KV_HEADS * GROUP):
                scores = case.keys[seen, head // GROUP] @ case.queries[row, head] * SCALE
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                weights = scores.softmax(0)[: len(seen)]
                outputs[row, head] = weights @ case.values[seen, head // GROUP]
    return outputs


def dense(
    case: Problem,
    window: Window,
    device: str,
    prepared: set[Window] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `attend` computes on `device`, on the CPU; prepared: windows of the metadata."""
    metadata = prepare_metadata(case.batch, prepared or {window}, torch.device(device))
    tensors = [tensor.to(device) for tensor in (case.queries, case.keys, case.values)]
    own = None if sinks is None else sinks.to(device)
    return attend(*tensors, metadata, window, SCALE, own).cpu()


def request_shapes() -> st.SearchStrategy[tuple[int, int]]:
    """(new rows, KV length), decodes as often as chunks."""
    rows = st.one_of(st.just(1), st.integers(1, 12))
    return st.tuples(rows, st.integers(0, 40)).map(lambda shape: (shape[0], sum(shape)))


@pytest.mark.parametrize("device", DEVICES)
@given(
    st.lists(request_shapes(), max_size=8),
    st.none() | st.integers(1, 50),
    st.integers(0, 9),
    st.booleans(),
)
@settings(deadline=None)
def test_every_row_sees_the_keys_up_to_its_own_within_the_window(
    device: str, requests: list[tuple[int, int]], window: Window, seed: int, gathered: bool
) -> None:
    case = problem(requests, seed, gathered=gathered)
    actual = dense(case, window, device)
    torch.testing.assert_close(actual, naive(case, window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_one_preparation_serves_layers_with_and_without_a_window(device: str) -> None:
    case = problem([(1, 30), (7, 20), (1, 9), (5, 5)])
    for window in (None, 4):
        actual = dense(case, window, device, prepared={None, 4})
        torch.testing.assert_close(actual, naive(case, window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("gathered", [False, True])
def test_a_sink_is_one_more_score_of_its_head(device: str, window: Window, gathered: bool) -> None:
    sinks = torch.tensor([-1.0, 0.0, 4.0, 1.0, 2.0, -50.0])
    case = problem([(1, 30), (7, 7), (7, 20), (1, 9), (1, 1)], gathered=gathered)
    actual = dense(case, window, device, sinks=sinks)
    torch.testing.assert_close(actual, naive(case, window, sinks), rtol=0, atol=1e-5)
    assert not torch.allclose(actual, naive(case, window), atol=0.1)


@pytest.mark.parametrize("window", [None, 16])
def test_decodes_of_similar_length_share_a_call_and_padding_stays_below_half(
    window: Window,
) -> None:
    lengths = [100, 101, 102, 150, 10, 11, 3]
    batch = problem([(1, length) for length in lengths]).batch
    groups = prepare_metadata(batch, {window}, torch.device("cpu")).groups
    assert len(groups) == 3
    assert sum(group.rows.numel() for group in groups) == len(lengths)
    kept = sum(min(length, window or length) for length in lengths)
    assert sum(group.views[window].slots.numel() for group in groups) < 2 * kept


def test_a_window_reads_only_the_keys_it_can_see() -> None:
    groups = prepare_metadata(problem([(4, 100)]).batch, {10}, torch.device("cpu")).groups
    assert groups[0].views[10].slots.shape == (1, 13)
