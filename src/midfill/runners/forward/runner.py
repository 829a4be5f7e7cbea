"""Runner: the engine's view of a model. It owns the weights and the KV cache of all slots."""

from collections.abc import Sequence
from typing import Protocol

from midfill.arrays import Float32Array, RunnerArray
from midfill.kv.state_pool import StateStore
from midfill.models.config import ModelConfig
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.cells import CellStore
from midfill.runners.forward.logits import LogitsOps


class Runner(Protocol):
    """Runs forward passes over packed batches.

    A runner holds the KV of ``slots`` slots and knows nothing about requests: the engine decides
    which slots a row reads and writes. Logits and hidden rows are arrays of the runner's own type,
    where it keeps them; what else has to be done with them, it does.

    Attributes:
        config: the model's shapes.
        logits_ops: what sampling asks of its logits.
    """

    config: ModelConfig
    logits_ops: LogitsOps

    @property
    def slots(self) -> int:
        """Number of tokens whose KV fits."""

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache of all slots, and of all states, in bytes."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in memory, in bytes."""

    @property
    def description(self) -> str:
        """What runs the model, in words: "CPU kernels, 2 threads"."""

    @property
    def build(self) -> str:
        """The code that computes: KV of runners of one build has the same bits."""

    @property
    def cells(self) -> CellStore:
        """The KV cache, cell by cell."""

    @property
    def states(self) -> StateStore | None:
        """The states of sequences, which a batch's rows advance; None for models without."""

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """Write K and V of the batch to its slots; return logits [outputs, vocab] float32.

        The next call may overwrite the returned array.
        """

    def argmax_tokens(self, logits: RunnerArray) -> list[int]:
        """Return the token of each row's largest logit, of equal ones the first.

        Args:
            logits: what the last ``forward`` or ``compute_logits`` returned.

        Returns:
            One token id per row; -1 may stand where one of its logits isn't finite.
        """

    def embed(self, batch: ForwardBatch) -> RunnerArray:
        """Return the tokens' embeddings: new hidden rows [rows, hidden], the caller's own.

        With ``run_layers`` and ``compute_logits``, a step runs in parts: ``forward`` is ``embed``,
        all layers, and ``compute_logits``. Between two parts the caller may run other batches, and
        drop, join or reorder rows, if the next part's batch says what the rows then are
        (``ForwardBatch.visible_slots`` where they don't follow one another).
        """

    def join(self, parts: Sequence[RunnerArray]) -> RunnerArray:
        """Return hidden rows, one part below the other, as an array of their own."""

    def run_layers(
        self, batch: ForwardBatch, hidden: RunnerArray, first: int, end: int
    ) -> RunnerArray:
        """Run layers first <= i < end, which write K and V of the batch's rows.

        Args:
            batch: the rows.
            hidden: [rows, hidden], contiguous, as layer first - 1 left them; may be overwritten.
            first, end: the layers.

        Returns:
            The hidden rows, as layer end - 1 leaves them.
        """

    def compute_logits(self, batch: ForwardBatch, hidden: RunnerArray) -> RunnerArray:
        """Return the logits [outputs, vocab] float32 of hidden rows that left the last layer.

        The next call may overwrite the returned array.
        """

    def observed_queries(
        self, batch: ForwardBatch, first: int = 0, end: int | None = None
    ) -> Float32Array:
        """Return the rotated queries of the last batch's observed rows.

        Args:
            batch: the last one.
            first, end: the layers, which it must have run through; None is all after ``first``.

        Returns:
            float32 [layers, observed rows, query_heads, head_dim], the caller's own.
        """
