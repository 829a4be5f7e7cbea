"""Attention plans: lists of spans, and which plans fit a model and a request's rows."""

from dataclasses import replace

import numpy as np
import pytest
from sparse_planners import MadePlanner

from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import (
    QUERY_BLOCK,
    AttentionPlan,
    KeyPart,
    SpanLists,
    query_blocks,
)
from midfill.runners.forward.batch import ForwardBatch


def expanded(lists: SpanLists, unit: int) -> list[int]:
    spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]
    return [key for start, end in spans.tolist() for key in range(start, end)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_lists_of_a_mask_hold_its_keys_in_spans_apart(share: float) -> None:
    listed = np.random.default_rng(0).random((3, 2, 77)) < share
    lists = SpanLists.from_mask(listed)
    assert lists.indptr.dtype == lists.spans.dtype == np.int32
    for unit in range(6):
        assert expanded(lists, unit) == np.flatnonzero(listed.reshape(6, 77)[unit]).tolist()
        spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]
        assert (spans[1:, 0] > spans[:-1, 1]).all()


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_lists_of_everything_end_with_each_blocks_last_row(rows: int) -> None:
    lists = SpanLists.of_everything(2, 10, rows)
    assert len(lists.indptr) - 1 == 2 * query_blocks(rows)
    for unit in range(2 * query_blocks(rows)):
        last = min(rows, (unit // 2 + 1) * QUERY_BLOCK)
        assert expanded(lists, unit) == list(range(10 + last))


CONFIG = ModelConfig("toy", 2, 64, 4, 2, 16, 64, 100, 512)
NOTHING = np.zeros(0, np.int32)
SLOTS = np.arange(5, dtype=np.int32)
FOUR = np.arange(5, dtype=np.int32) * 3
"""Bounds of the four heads of ``CONFIG``, three cells each."""


def cells(indptr: np.ndarray = FOUR, count: int = 12, terms: KeyTerms | None = None) -> RaggedIndex:
    return RaggedIndex(np.arange(count, dtype=np.int32), indptr, terms)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (AttentionPlan(cells(FOUR[:4], 9)), "part 0: cells of 3 heads, but the model has 4"),
        (AttentionPlan(cells(count=11)), "part 0: 11 cells, but its heads have 12"),
        (
            AttentionPlan(cells(terms=KeyTerms.neutral(7))),
            "part 0: terms of 7 of 12 cells",
        ),
        (
            AttentionPlan(parts=(KeyPart(SLOTS), KeyPart(SLOTS, cells(count=13)))),
            "part 1: 13 cells, but its heads have 12",
        ),
        (
            AttentionPlan(parts=(KeyPart(SLOTS, visible=SLOTS[:2]),)),
            "part 0: it says for 2 rows what they see, not 3",
        ),
        (
            AttentionPlan(parts=(KeyPart(SLOTS, visible=np.array([1, 3, 6], np.int32)),)),
            "part 0: rows see 0 to 5 slots, later ones no fewer",
        ),
        (AttentionPlan(parts=(KeyPart(NOTHING),)), "part 0: it has no keys"),
        (
            AttentionPlan(parts=(KeyPart(SLOTS, temperature=0.0),)),
            "part 0: temperature and scale must be above 0",
        ),
        (
            AttentionPlan(cells(np.array([0, 1, 6, 9, 12], np.int32)), lister=MadePlanner()),
            "part 0: listed cells must be as many in each head of a layer",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_its_part(
    plan: AttentionPlan, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        plan.check(CONFIG, rows=3)


def test_a_batch_names_the_request_whose_plan_does_not_fit() -> None:
    rows, ends = np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32)
    batch = ForwardBatch(
        rows, rows, rows, ends, ends, rows, rows, attention=(None, AttentionPlan(cells(count=2)))
    )
    with pytest.raises(ValueError, match=r"^request 1, part 0: 2 cells"):
        batch.check_plans(CONFIG)


def test_parts_before_a_sliding_window_are_refused() -> None:
    windowed = replace(CONFIG, sliding_window=8)
    with pytest.raises(ValueError, match=r"^part 0: .* sliding window"):
        AttentionPlan(parts=(KeyPart(SLOTS),)).check(windowed, rows=1)
    AttentionPlan(cells()).check(windowed, rows=1)
