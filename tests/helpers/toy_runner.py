"""ToyRunner: a small deterministic decoder that attends over KV slots, for engine tests.

It computes in float64 and each request separately, so its logits depend only on the tokens that a
request reads through its slots: a wrong slot, a wrong position or KV that was never written changes
the answer; batching and chunking do not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from naive_probe import NaiveProbe, softmax

from midfill.arrays import Float64Array, Int32Array
from midfill.kv.quantized import cell_data
from midfill.kv.ragged import KeyTerms, RaggedIndex
from midfill.models.config import ModelConfig
from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.forward.attention import AttentionPlan, KeyLister, KeyPart
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.cells import CellLayout, StoredCells
from midfill.runners.forward.logits import argmax_tokens

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

    logits_ops = NUMPY_LOGITS
    build = "toy"
    states = None

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
        normal = np.random.default_rng(8).standard_normal
        self._embed = normal((VOCAB, HIDDEN))
        self._positions = positions * normal((context, HIDDEN))
        self._weights = normal((layers, 3, HIDDEN, HIDDEN)) / HIDDEN**0.5
        self._head = normal((HIDDEN, VOCAB))
        # NaN until written: reading a slot too early gives NaN logits.
        self._kv = np.full((layers, 2, slots, HIDDEN), np.nan)
        self._queries: list[Float64Array] = []
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
        observed = [layer[batch.observed_rows] for layer in self._queries[first:end]]
        return np.stack(observed)[:, :, None].astype(np.float32)

    def forward(self, batch: ForwardBatch) -> Float64Array:
        self.batches.append(batch)
        hidden = self._run_layers(batch, self.embed(batch), 0, self.config.layers)
        return self.compute_logits(batch, hidden)

    def argmax_tokens(self, logits: Float64Array) -> list[int]:
        return argmax_tokens(self.logits_ops, logits)

    def join(self, parts: Sequence[Float64Array]) -> Float64Array:
        return np.concatenate(parts)

    def embed(self, batch: ForwardBatch) -> Float64Array:
        return self._embed[batch.token_ids] + self._positions[batch.positions]

    def run_layers(
        self, batch: ForwardBatch, hidden: Float64Array, first: int, end: int
    ) -> Float64Array:
        assert 0 <= first < end <= self.config.layers
        self.parts.append(Part(batch, first, end))
        return self._run_layers(batch, hidden, first, end)

    def compute_logits(self, batch: ForwardBatch, hidden: Float64Array) -> Float64Array:
        assert len(hidden) == batch.rows
        return (hidden[batch.logit_rows] @ self._head).astype(np.float32)

    def _run_layers(
        self, batch: ForwardBatch, hidden: Float64Array, first: int, end: int
    ) -> Float64Array:
        _check(batch)
        assert hidden.shape == (batch.rows, HIDDEN)
        self._queries = [np.empty((0, HIDDEN))] * self.config.layers
        counts = batch.slots_seen()
        outputs = []
        for index in range(batch.requests):
            rows = slice(batch.query_indptr[index], batch.query_indptr[index + 1])
            seen = batch.kv_slots[batch.kv_indptr[index] : batch.kv_indptr[index + 1]]
            outputs.append(
                self._run_one(
                    hidden[rows],
                    batch.write_slots[rows],
                    seen[: counts[rows][-1]],
                    counts[rows],
                    (batch.attention[index] if batch.attention else None) or AttentionPlan(),
                    range(first, end),
                )
            )
        return np.concatenate(outputs)

    def _run_one(
        self,
        hidden: Float64Array,
        write: Int32Array,
        seen: Int32Array,
        counts: Int32Array,
        plan: AttentionPlan,
        layers: range,
    ) -> Float64Array:
        for layer in layers:
            query, key, value = (hidden @ weight for weight in self._weights[layer])
            self._queries[layer] = np.concatenate((self._queries[layer], query))
            self._kv[layer, 0, write] = key
            self._kv[layer, 1, write] = value
            mixed, masses = [], []
            for part in (*plan.parts, KeyPart(seen, plan.cells, counts)):
                own = plan.lister if part.cells is plan.cells and part.temperature == 1.0 else None
                scores, values, weights = self._scores(layer, query, part, own)
                mixed.append((softmax(scores, -1) * weights) @ values)
                masses.append(part.power * np.logaddexp.reduce(scores, -1))
            shares = softmax(np.stack(masses), 0)[..., None]
            hidden = np.tanh(hidden + (shares * np.stack(mixed)).sum(0))
        return hidden

    def _scores(
        self, layer: int, query: Float64Array, part: KeyPart, lister: KeyLister | None
    ) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Scores [rows, keys] of a part's keys, their values, and the factors of their weights."""
        flat = self._kv.swapaxes(0, 1).reshape(2, -1, HIDDEN)
        keys, values = self._kv[layer][:, part.slots]
        counts = np.full(len(query), len(keys))
        if part.visible is not None:
            counts = part.visible
        terms = np.repeat([[1.0], [0.0], [1.0]], len(keys), axis=1)
        cells = 0
        if part.cells is not None:
            own = slice(part.cells.indptr[layer], part.cells.indptr[layer + 1])
            kept = flat[:, part.cells.cells[own]]
            keys, values = np.concatenate((kept[0], keys)), np.concatenate((kept[1], values))
            terms = np.concatenate((_terms(part.cells)[:, own], terms), axis=1)
            rounded = self._quantized(layer, part.cells)
            keys, values = (
                np.concatenate(both) for both in zip(rounded, (keys, values), strict=True)
            )
            ones = np.repeat([[1.0], [0.0], [1.0]], len(rounded[0]), axis=1)
            terms = np.concatenate((ones, terms), axis=1)
            cells = kept.shape[1] + len(rounded[0])
        future = np.arange(len(keys)) >= cells + counts[:, None]
        if lister is not None:
            probe = NaiveProbe(layer, query[:, None], keys[:, None], HIDDEN**-0.5)
            future |= ~lister.plan(probe).mask(*future.shape)[0]
            lister.record(layer, np.array([future.size - int(future.sum())]))
        scores = query @ keys.T / HIDDEN**0.5 / part.temperature * terms[0] + terms[1]
        return np.where(future, -np.inf, scores), values, terms[2]

    def _quantized(self, layer: int, cells: RaggedIndex) -> list[np.ndarray]:
        """What the quantised keys and values of a layer stand for, [n, HIDDEN] each."""
        found = [(np.zeros((0, HIDDEN)), np.zeros((0, HIDDEN)))]
        blocks = cells.quantized
        for number in () if blocks is None else blocks.numbers(layer):
            data = cell_data(*self.cells.dump(blocks.cells_of(number)))
            found.append(blocks.block(number, data).decode(HIDDEN))
        return [np.concatenate(each) for each in zip(*found, strict=True)]


def _terms(ragged: RaggedIndex) -> Float64Array:
    """The score factors, score biases and value factors of an index, [3, cells]."""
    terms = ragged.terms or KeyTerms.neutral(len(ragged.cells))
    arrays = (terms.score_factor, terms.score_bias, terms.value_factor)
    return np.stack(arrays).astype(np.float64)


class ToyCells:
    """The toy runner's KV cell by cell; implements forward.cells.CellStore, without shifts."""

    def __init__(self, kv: Float64Array) -> None:
        self._kv = kv

    def read(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self.take(cells).arrays
        return keys.astype(np.float32), values.astype(np.float32)

    def read_keys(self, cells: np.ndarray) -> np.ndarray:
        return self.read(cells)[0]

    def write(self, cells: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        stored = tuple(array.astype(np.float64) for array in (keys, values))
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
        return tuple(array.view(np.uint8) for array in self.take(cells).arrays)

    def restore(self, cells: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        stored = (array.copy().view(np.float64) for array in arrays)
        self.put(cells, StoredCells(tuple(stored)))

    def _place(self, cells: np.ndarray) -> tuple[Int32Array, Int32Array]:
        return np.divmod(cells, self._kv.shape[2])


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
