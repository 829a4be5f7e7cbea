"""What the rows of a batch attend to."""

from dataclasses import replace

import numpy as np

from midfill.kv.ragged import RaggedIndex
from midfill.runners.forward.attention import AttentionPlan, KeyPart
from midfill.runners.forward.batch import ForwardBatch


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# The first request has 2 rows at the end of 5 slots, the second one row after 2 slots.
BATCH = ForwardBatch(
    token_ids=int32(1, 2, 3),
    positions=int32(3, 4, 2),
    write_slots=int32(3, 4, 12),
    query_indptr=int32(0, 2, 3),
    kv_indptr=int32(0, 5, 8),
    kv_slots=int32(0, 1, 2, 3, 4, 10, 11, 12),
    logit_rows=int32(1, 2),
)
CELLS = RaggedIndex(int32(7, 8, 9, 20, 21, 40), int32(0, 3, 5, 6, 6))
"""Six cells of four heads."""


def test_rows_see_their_requests_slots_up_to_their_own() -> None:
    assert BATCH.slots_seen().tolist() == [4, 5, 3]
    assert BATCH.keys_seen().tolist() == [4, 5, 3]


def test_rows_may_see_other_slots() -> None:
    batch = replace(BATCH, visible_slots=int32(2, 5, 3))
    assert batch.slots_seen().tolist() == [2, 5, 3]


def test_keys_are_also_cells_and_those_of_parts() -> None:
    parts = (
        KeyPart(int32(30, 31, 32), visible=int32(1, 3)),
        KeyPart(int32(33, 34), CELLS),
    )
    batch = replace(BATCH, attention=(AttentionPlan(parts=parts), AttentionPlan(CELLS)))
    assert batch.slots_seen().tolist() == [4, 5, 3]
    assert batch.keys_seen().tolist() == [4 + 1 + 2 + 1.5, 5 + 3 + 2 + 1.5, 3 + 1.5]
