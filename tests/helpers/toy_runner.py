"""ToyRunner: a small deterministic decoder that attends over KV slots, for engine tests.

It computes in float64 and each request separately, so its logits depend only on the tokens that a
request reads through its slots: a wrong slot, a wrong position or KV that was never written changes
the answer; batching and chunking do not.
"""

import numpy as np
import torch

from midfill.forward.batch import ForwardBatch
from midfill.models.config import ModelConfig

LAYERS, HIDDEN, VOCAB, CONTEXT = 2, 12, 40, 200


class ToyRunner:
    """A two-layer, single-head decoder with random weights; implements forward.runner.Runner."""

    def __init__(self, slots: int, context: int = CONTEXT, positions: float = 1.0) -> None:
        """Create random weights; a small weight of ``positions`` makes greedy answers repeat."""
        self.config = ModelConfig(
            family="toy",
            layers=LAYERS,
            hidden=HIDDEN,
            query_heads=1,
            kv_heads=1,
            head_dim=HIDDEN,
            ffn=0,
            vocab=VOCAB,
            context=context,
        )
        generator = torch.Generator().manual_seed(7)
        options = {"generator": generator, "dtype": torch.float64}
        self._embed = torch.randn(VOCAB, HIDDEN, **options)
        self._positions = positions * torch.randn(context, HIDDEN, **options)
        self._weights = torch.randn(LAYERS, 3, HIDDEN, HIDDEN, **options) / HIDDEN**0.5
        self._head = torch.randn(HIDDEN, VOCAB, **options)
        # NaN until written: reading a slot too early gives NaN logits.
        self._kv = torch.full((LAYERS, 2, slots, HIDDEN), torch.nan, dtype=torch.float64)
        self.batches: list[ForwardBatch] = []

    @property
    def slots(self) -> int:
        return self._kv.shape[2]

    @property
    def kv_bytes(self) -> int:
        return self._kv.nbytes

    @property
    def weight_bytes(self) -> int:
        return self._weights.nbytes

    @property
    def description(self) -> str:
        return "toy"

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        _check(batch)
        self.batches.append(batch)
        outputs = []
        for index in range(batch.requests):
            rows = slice(batch.query_indptr[index], batch.query_indptr[index + 1])
            seen = batch.kv_slots[batch.kv_indptr[index] : batch.kv_indptr[index + 1]]
            outputs.append(
                self._forward_one(
                    torch.from_numpy(batch.token_ids[rows]).long(),
                    torch.from_numpy(batch.positions[rows]).long(),
                    torch.from_numpy(batch.write_slots[rows]).long(),
                    torch.from_numpy(seen).long(),
                )
            )
        hidden = torch.cat(outputs)
        return (hidden[torch.from_numpy(batch.logit_rows).long()] @ self._head).float()

    def _forward_one(
        self, tokens: torch.Tensor, positions: torch.Tensor, write: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        hidden = self._embed[tokens] + self._positions[positions]
        rows, length = len(tokens), len(seen)
        future = torch.arange(length) > torch.arange(length - rows, length)[:, None]
        for layer in range(LAYERS):
            query, key, value = (hidden @ weight for weight in self._weights[layer])
            self._kv[layer, 0, write] = key
            self._kv[layer, 1, write] = value
            scores = query @ self._kv[layer, 0, seen].T / HIDDEN**0.5
            attention = scores.masked_fill(future, -torch.inf).softmax(-1)
            hidden = torch.tanh(hidden + attention @ self._kv[layer, 1, seen])
        return hidden


def _check(batch: ForwardBatch) -> None:
    """Check the contract of ForwardBatch."""
    for array in vars(batch).values():
        assert isinstance(array, tuple) or array.dtype == np.int32
    assert batch.query_indptr[0] == batch.kv_indptr[0] == 0
    assert batch.query_indptr[-1] == batch.rows == len(batch.positions) == len(batch.write_slots)
    assert batch.kv_indptr[-1] == len(batch.kv_slots)
    assert len(set(batch.write_slots.tolist())) == batch.rows, "two rows write one slot"
    assert (np.diff(batch.logit_rows) > 0).all()
    for index in range(batch.requests):
        rows = slice(batch.query_indptr[index], batch.query_indptr[index + 1])
        seen = batch.kv_slots[batch.kv_indptr[index] : batch.kv_indptr[index + 1]]
        count = rows.stop - rows.start
        assert count > 0
        assert len(set(seen.tolist())) == len(seen), "one slot holds two positions"
        assert seen[-count:].tolist() == batch.write_slots[rows].tolist()
        assert batch.positions[rows].tolist() == list(range(len(seen) - count, len(seen)))
