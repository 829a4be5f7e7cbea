"""ToyRunner: a small deterministic decoder that attends over KV slots, for engine tests.

It computes in float64 and each request separately, so its logits depend only on the tokens that a
request reads through its slots: a wrong slot, a wrong position or KV that was never written changes
the answer; batching and chunking do not.
"""

from typing import NamedTuple

import numpy as np
import torch

from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import AttentionPlan, KeyLister, KeyPart
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.cells import CellLayout, StoredCells
from midfill.runners.forward.likeliest import likeliest_tokens
from midfill.runners.torch.part_attention import TorchProbe, list_mask

LAYERS, HIDDEN, VOCAB, CONTEXT = 2, 12, 40, 200


class Part(NamedTuple):
    """A call of ``run_layers``."""

    batch: ForwardBatch
    first: int
    end: int


class ToyRunner:
    """A single-head decoder with random weights; implements forward.runner.Runner.

    ``batches`` are those of whole passes, ``parts`` those of passes in parts.
    """

    def __init__(
        self,
        slots: int,
        context: int = CONTEXT,
        positions: float = 1.0,
        layers: int = LAYERS,
    ) -> None:
        """Create random weights; a small weight of ``positions`` makes greedy answers repeat."""
        self.config = ModelConfig(
            family="toy",
            layers=layers,
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
        self._weights = torch.randn(layers, 3, HIDDEN, HIDDEN, **options) / HIDDEN**0.5
        self._head = torch.randn(HIDDEN, VOCAB, **options)
        # NaN until written: reading a slot too early gives NaN logits.
        self._kv = torch.full((layers, 2, slots, HIDDEN), torch.nan, dtype=torch.float64)
        self._queries: list[torch.Tensor] = []
        self.batches: list[ForwardBatch] = []
        self.parts: list[Part] = []

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

    @property
    def cells(self) -> "ToyCells":
        return ToyCells(self._kv)

    def observed_queries(
        self, batch: ForwardBatch, first: int = 0, end: int | None = None
    ) -> np.ndarray:
        rows = torch.from_numpy(batch.observed_rows).long()
        observed = [layer[rows] for layer in self._queries[first:end]]
        return torch.stack(observed)[:, :, None].float().numpy()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        hidden = self._run_layers(batch, self.embed(batch), 0, self.config.layers)
        return self.compute_logits(batch, hidden)

    def likeliest_tokens(self, logits: torch.Tensor) -> list[int]:
        return likeliest_tokens(logits)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        tokens, positions = (
            torch.from_numpy(array).long() for array in (batch.token_ids, batch.positions)
        )
        return self._embed[tokens] + self._positions[positions]

    def run_layers(
        self, batch: ForwardBatch, hidden: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        assert 0 <= first < end <= self.config.layers
        self.parts.append(Part(batch, first, end))
        return self._run_layers(batch, hidden, first, end)

    def compute_logits(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        assert len(hidden) == batch.rows
        return (hidden[torch.from_numpy(batch.logit_rows).long()] @ self._head).float()

    def _run_layers(
        self, batch: ForwardBatch, hidden: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        _check(batch)
        assert hidden.shape == (batch.rows, HIDDEN)
        self._queries = [torch.empty(0, HIDDEN)] * self.config.layers
        counts = batch.slots_seen()
        outputs = []
        for index in range(batch.requests):
            rows = slice(batch.query_indptr[index], batch.query_indptr[index + 1])
            seen = batch.kv_slots[batch.kv_indptr[index] : batch.kv_indptr[index + 1]]
            outputs.append(
                self._run_one(
                    hidden[rows],
                    torch.from_numpy(batch.write_slots[rows]).long(),
                    torch.from_numpy(seen[: counts[rows][-1]]).long(),
                    torch.from_numpy(counts[rows]),
                    (batch.attention[index] if batch.attention else None) or AttentionPlan(),
                    range(first, end),
                )
            )
        return torch.cat(outputs)

    def _run_one(
        self,
        hidden: torch.Tensor,
        write: torch.Tensor,
        seen: torch.Tensor,
        counts: torch.Tensor,
        plan: AttentionPlan,
        layers: range,
    ) -> torch.Tensor:
        for layer in layers:
            query, key, value = (hidden @ weight for weight in self._weights[layer])
            self._queries[layer] = torch.cat((self._queries[layer], query))
            self._kv[layer, 0, write] = key
            self._kv[layer, 1, write] = value
            mixed, masses = [], []
            for part in (*plan.parts, KeyPart(seen.numpy(), plan.cells, counts.numpy())):
                own = plan.lister if part.cells is plan.cells and part.temperature == 1.0 else None
                scores, values, weights = self._scores(layer, query, part, own)
                mixed.append((scores.softmax(-1) * weights) @ values)
                masses.append(part.power * scores.logsumexp(-1))
            shares = torch.stack(masses).softmax(0)[..., None]
            hidden = torch.tanh(hidden + (shares * torch.stack(mixed)).sum(0))
        return hidden

    def _scores(
        self, layer: int, query: torch.Tensor, part: KeyPart, lister: KeyLister | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores [rows, keys] of a part's keys, their values, and the factors of their weights."""
        flat = self._kv.transpose(0, 1).reshape(2, -1, HIDDEN)
        keys, values = self._kv[layer, :, torch.from_numpy(part.slots).long()]
        counts = torch.full((len(query),), len(keys))
        if part.visible is not None:
            counts = torch.from_numpy(part.visible)
        terms = torch.tensor([[1.0], [0.0], [1.0]]).repeat(1, len(keys))
        cells = 0
        if part.cells is not None:
            own = slice(part.cells.indptr[layer], part.cells.indptr[layer + 1])
            kept = flat[:, torch.from_numpy(part.cells.cells[own]).long()]
            keys, values = torch.cat((kept[0], keys)), torch.cat((kept[1], values))
            terms = torch.cat((_terms(part.cells)[:, own], terms), dim=1)
            cells = kept.shape[1]
        future = torch.arange(len(keys)) >= cells + counts[:, None]
        if lister is not None:
            probe = TorchProbe(layer, query[:, None], keys[:, None], HIDDEN**-0.5)
            future |= ~torch.from_numpy(list_mask(lister.plan(probe), *future.shape)[0])
            lister.record(layer, np.array([future.numel() - int(future.sum())]))
        scores = query @ keys.T / HIDDEN**0.5 / part.temperature * terms[0] + terms[1]
        return scores.masked_fill(future, -torch.inf), values, terms[2]


def _terms(ragged: RaggedIndex) -> torch.Tensor:
    """The score factors, score biases and value factors of an index, [3, cells]."""
    terms = ragged.terms or KeyTerms.neutral(len(ragged.cells))
    arrays = (terms.score_factor, terms.score_bias, terms.value_factor)
    return torch.from_numpy(np.stack(arrays)).double()


class ToyCells:
    """The toy runner's KV cell by cell; implements forward.cells.CellStore, without shifts."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv

    def read(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = (array.numpy() for array in self.take(cells).arrays)
        return keys.astype(np.float32), values.astype(np.float32)

    def read_keys(self, cells: np.ndarray) -> np.ndarray:
        return self.read(cells)[0]

    def write(self, cells: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        stored = tuple(torch.from_numpy(array).double() for array in (keys, values))
        self.put(cells, StoredCells(stored))

    def take(self, cells: np.ndarray, shift: np.ndarray | None = None) -> StoredCells:
        assert shift is None
        layers, slots = self._place(cells)
        return StoredCells((self._kv[layers, 0, slots], self._kv[layers, 1, slots]))

    def put(self, cells: np.ndarray, stored: StoredCells) -> None:
        layers, slots = self._place(cells)
        self._kv[layers, 0, slots], self._kv[layers, 1, slots] = stored.arrays

    @property
    def layout(self) -> CellLayout:
        return CellLayout("f64", (8 * HIDDEN, 8 * HIDDEN))

    def dump(self, cells: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(array.numpy().view(np.uint8) for array in self.take(cells).arrays)

    def restore(self, cells: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        stored = (torch.from_numpy(array.copy()).view(torch.float64) for array in arrays)
        self.put(cells, StoredCells(tuple(stored)))

    def _place(self, cells: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.from_numpy(cells).long()
        return numbers // self._kv.shape[2], numbers % self._kv.shape[2]


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
        counts = batch.slots_seen()[rows]
        assert (np.diff(counts) > 0).all()
        assert seen[counts - 1].tolist() == batch.write_slots[rows].tolist()
        plan = batch.attention[index] if batch.attention else None
        if not len(batch.visible_slots) and plan is None:
            first = int(counts[0]) - 1
            assert batch.positions[rows].tolist() == list(range(first, first + count))
