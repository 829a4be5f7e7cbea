"""A prompt with KV from elsewhere, row by row, and the attention of one without, as a matrix."""

from collections.abc import Callable, Mapping

import numpy as np

from midfill.arrays import Int64Array
from midfill.kv.ragged import cells_of_slots
from midfill.methods.reuse.method import LayerKV
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.rope import layer_frequencies, shift_keys
from serving import next_logits

Choose = Callable[[Int64Array, LayerKV, LayerKV], set[int]]


class NaiveBlend:
    """Blends one prompt row by row; its slot of position i is ``base`` + i."""

    def __init__(self, runner: CpuRunner, base: int) -> None:
        self.runner, self.base = runner, base
        self.keys: dict[tuple[int, int], np.ndarray] = {}

    def row(self, tokens: list[int], at: int, hidden: object, first: int, end: int) -> object:
        slots = np.arange(self.base, self.base + at + 1, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=np.array([tokens[at]], np.int32),
            positions=np.array([at], np.int32),
            write_slots=slots[-1:],
            query_indptr=np.array([0, 1], np.int32),
            kv_indptr=np.array([0, at + 1], np.int32),
            kv_slots=slots,
            logit_rows=np.array([0], np.int32),
        )
        hidden = self.runner.embed(batch) if hidden is None else hidden
        hidden = self.runner.run_layers(batch, hidden, first, end)
        return self.runner.compute_logits(batch, hidden).copy() if end == 3 else hidden

    def cells(self, slots: np.ndarray, layer: int) -> np.ndarray:
        heads = self.runner.config.kv_heads
        every = cells_of_slots(slots.astype(np.int32), 3 * heads, self.runner.slots)
        return every[layer * heads : (layer + 1) * heads]

    def kv(self, slots: np.ndarray, layer: int) -> LayerKV:
        pairs = [self.runner.cells.read(head) for head in self.cells(slots, layer)]
        return LayerKV(*(np.stack(each, axis=1) for each in zip(*pairs, strict=True)))

    def logits(
        self,
        tokens: list[int],
        source: list[int],
        places: Mapping[int, int],
        end: int,
        check: int,
        choose: Choose,
    ) -> np.ndarray:
        """Return the last token's logits.

        Args:
            tokens: the prompt.
            source: computed in the slots from 0 on.
            places: of each copied token, its number in the source.
            end: number of the first token after all that are computed beside them.
            check: layers that every row is computed through; 0 compares nothing.
            choose: returns which of the copied tokens go on, given their numbers, and their KV in
                the last of these layers as it was copied and as it is.
        """
        next_logits(self.runner, source)
        copied = np.array(sorted(places))
        origin = np.array([places[at] for at in copied])
        frequencies = layer_frequencies(self.runner.config)
        old = []
        for layer in range(3):
            kv = self.kv(origin, layer)
            shift = np.repeat(copied - origin, kv.keys.shape[1]).astype(np.int32)
            turned = shift_keys(kv.keys.reshape(-1, kv.keys.shape[2]), shift, frequencies, None)
            old.append(LayerKV(turned.reshape(kv.keys.shape), kv.values))
        hidden: list[object] = [None] * end
        if check:
            hidden = [self.row(tokens, at, None, 0, check) for at in range(end)]
        compared = max(check - 1, 0)
        again = choose(copied, old[compared], self.kv(copied + self.base, compared))
        for layer in range(check, 3):
            for head, cells in enumerate(self.cells(copied + self.base, layer)):
                keys, values = old[layer].keys[:, head], old[layer].values[:, head]
                self.runner.cells.write(cells, np.ascontiguousarray(keys), values.copy())
            for at in range(end):
                if at not in places or at in again:
                    hidden[at] = self.row(tokens, at, hidden[at], layer, layer + 1)
        for at in range(end, len(tokens)):
            last = self.row(tokens, at, None, 0, 3)
        return np.asarray(last)[0]


def dense_attention(runner: CpuRunner, tokens: list[int]) -> np.ndarray:
    """Return a prompt's attention weights [layers, rows, keys], a mean over query heads.

    Float64, from all queries and keys of a pass over the whole prompt.
    """
    length, config = len(tokens), runner.config
    slots, ends = np.arange(length, dtype=np.int32), np.array([0, length], np.int32)
    batch = ForwardBatch(
        token_ids=np.array(tokens, np.int32),
        positions=slots,
        write_slots=slots,
        query_indptr=ends,
        kv_indptr=ends,
        kv_slots=slots,
        logit_rows=slots[-1:],
        observed_rows=slots,
    )
    runner.forward(batch)
    queries = runner.observed_queries(batch).astype(np.float64)
    cells = cells_of_slots(slots, config.layers * config.kv_heads, runner.slots)
    group, weights = config.query_heads // config.kv_heads, []
    for layer in range(config.layers):
        heads = []
        for head in range(config.query_heads):
            keys, _ = runner.cells.read(cells[layer * config.kv_heads + head // group])
            scores = queries[layer, :, head] @ keys.T * config.head_dim**-0.5
            scores[np.triu_indices(length, 1)] = -np.inf
            exponents = np.exp(scores)
            heads.append(exponents / exponents.sum(axis=1, keepdims=True))
        weights.append(np.mean(heads, axis=0))
    return np.array(weights)
