"""ModelProbe: runs a model over one text and shows what its heads hold; for calibrations."""

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.kv.ragged import cells_of_slots
from midfill.methods.evict.method import SequenceKeys
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner

_CHUNK_ROWS = 128


class ModelProbe:
    """One text in the first slots of a runner.

    Args:
        runner: runs the model; nothing else uses it meanwhile.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def close(self) -> None:
        """End the runner's threads."""
        close = getattr(self.runner, "close", None)
        if close is not None:
            close()

    def queries(self, tokens: Int32Array, begin: int, observed: int) -> Float32Array:
        """Compute tokens[begin:]; return the rotated queries of the rows from ``observed`` on.

        Args:
            tokens: [n] int32, of which those before ``begin`` are computed.
            begin: number of the first token to compute.
            observed: number of the first token whose query is wanted.

        Returns:
            float32 [layers, n - observed, query_heads, head_dim].
        """
        found = []
        for start in range(begin, len(tokens), _CHUNK_ROWS):
            end = min(start + _CHUNK_ROWS, len(tokens))
            rows = np.arange(max(start, observed), end, dtype=np.int32) - np.int32(start)
            batch = _batch(tokens, start, end, rows, rows[:0])
            self.runner.forward(batch)
            if len(rows):
                found.append(self.runner.observed_queries(batch))
        return np.concatenate(found, axis=1)

    def greedy(self, tokens: Int32Array, count: int, ends: tuple[int, ...]) -> Int32Array:
        """Return the most likely continuation, token by token.

        Args:
            tokens: [n] int32, all but the last of which are computed.
            count: maximum number of tokens.
            ends: tokens that end it; they don't belong to it.
        """
        text = tokens
        nothing = np.zeros(0, np.int32)
        for _ in range(count):
            batch = _batch(text, len(text) - 1, len(text), nothing, np.zeros(1, np.int32))
            best = int(self.runner.forward(batch)[0].argmax())
            if best in ends:
                break
            text = np.append(text, np.int32(best))
        return text[len(tokens) :]

    def keys(self, count: int) -> SequenceKeys:
        """Return the keys and values of the text's first ``count`` tokens."""
        config = self.runner.config
        slots = np.arange(count, dtype=np.int32)
        cells = cells_of_slots(slots, config.layers * config.kv_heads, self.runner.slots)
        return SequenceKeys(config, list(cells), self.runner.cells)


def _batch(
    tokens: Int32Array, begin: int, end: int, observed: Int32Array, outputs: Int32Array
) -> ForwardBatch:
    seen = np.arange(end, dtype=np.int32)
    return ForwardBatch(
        token_ids=tokens[begin:end],
        positions=seen[begin:],
        write_slots=seen[begin:],
        query_indptr=np.array([0, end - begin], np.int32),
        kv_indptr=np.array([0, end], np.int32),
        kv_slots=seen,
        logit_rows=outputs,
        observed_rows=observed,
    )
