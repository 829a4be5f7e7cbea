"""ForwardBatch: one step's rows, packed, as the model sees them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ForwardBatch:
    """Rows (tokens) of many requests in one packed batch, decodes and prefill chunks alike.

    Request b owns rows ``query_indptr[b]:query_indptr[b + 1]`` and sees the KV of
    ``kv_slots[kv_indptr[b]:kv_indptr[b + 1]]``, in order of position, its own new rows' slots
    last. Row i of its q rows (i from 0) attends to the first ``kv_length - q + i + 1`` of them.

    Attributes:
        token_ids: [rows] int32.
        positions: [rows] int32, for the rotary embedding.
        write_slots: [rows] int32, the slot where each row's K and V go.
        query_indptr: [requests + 1] int32.
        kv_indptr: [requests + 1] int32.
        kv_slots: [sum of KV lengths] int32.
        logit_rows: [outputs] int32, the rows whose logits are wanted, ascending.
    """

    token_ids: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    query_indptr: Int32Array
    kv_indptr: Int32Array
    kv_slots: Int32Array
    logit_rows: Int32Array

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    @property
    def requests(self) -> int:
        return len(self.query_indptr) - 1
