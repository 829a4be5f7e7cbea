"""CompressionState: when a sequence's method decides, and what it has observed until then."""

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.methods.evict.method import CompressionMethod, RecallingMethod, SequenceCompressor
from midfill.models.config import ModelConfig

LONGEST_CHECK = 128
"""Tokens by which the check for an empty answer may put off the first point after the prompt: one
for each byte that an answer can have to begin with."""


class CompressionState:
    """A method at work on one sequence.

    It decides at *points*, numbers of computed tokens: at the end of the prompt, or where the
    request says, and then, if it has an interval, after every so many tokens. Points depend on the
    request and its tokens alone, and no step crosses one, so a preempted answer meets the same
    points again.

    Attributes:
        compressor: the method with its state.
        points: how many points it has decided at since the sequence was admitted.
        last_point: the latest of them.
    """

    def __init__(
        self, method: CompressionMethod, config: ModelConfig, tokens: Int32Array, tenant: str
    ) -> None:
        """Note what decides.

        Args:
            method: what decides.
            config: the model.
            tokens: [n] int32, those before the first decision.
            tenant: whose they are.
        """
        self._method = method
        self._config = config
        self._tokens = tokens
        self._tenant = tenant
        self._observed: list[Float32Array] = []
        self._observed_from = 0
        self._recalled = 0
        self.compressor: SequenceCompressor
        self.points: int
        self.last_point: int
        self.restart()

    @property
    def first_point(self) -> int:
        """Number of tokens before the first decision."""
        return len(self._tokens)

    @property
    def first_observed(self) -> int:
        """Position of the first row whose query is observed."""
        return max(self.first_point - self._method.observed_rows, self._recalled)

    @property
    def observes_blocks(self) -> bool:
        """Whether rows are observed block by block, since their queries had better not be kept."""
        return self._method.block_rows > 0

    @property
    def decides_again(self) -> bool:
        """Whether there is another point."""
        return not self.points or self._method.interval > 0

    @property
    def next_point(self) -> int:
        """The next point, where it ``decides_again`` and nothing puts the point off."""
        return self.last_point + self._method.interval if self.points else self.first_point

    @property
    def tokens_ahead(self) -> int:
        """Tokens that may follow a point until the next; 0 where there is none."""
        interval = self._method.interval
        return interval + LONGEST_CHECK if interval else 0

    def observed_rows(self, computed: int, tokens: int, drafted: int) -> range:
        """Return which rows of a step have their queries observed, counted from its first one.

        Args:
            computed: position of the first row.
            tokens: rows of known tokens.
            drafted: rows of drafted tokens after these.
        """
        if not self.points:
            first, end = self.first_observed, min(self.first_point, computed + tokens)
        elif self._method.interval and self._method.observed_rows:
            first, end = self.last_point, computed + tokens + drafted
        else:
            return range(0)
        first = max(first, computed)
        return range(first - computed, max(first, end) - computed)

    def observe(self, position: int, queries: Float32Array) -> None:
        """Keep the queries of observed rows.

        Args:
            position: of the first one.
            queries: float32 [layers, n, query_heads, head_dim].
        """
        if not self._observed:
            self._observed_from = position
        self._observed.append(queries)

    def forget_after(self, computed: int) -> None:
        """Forget the queries of rows that are not among the first ``computed``: wrong drafts."""
        if self._observed:
            self._observed = [self._all_observed()[:, : computed - self._observed_from]]

    def take_block(self, computed: int) -> tuple[int, Float32Array] | None:
        """Return the next whole block of observed rows before the first point, and forget it.

        Blocks end at multiples of ``block_rows``; what comes after the last such end before the
        first point is left to ``take``.

        Args:
            computed: number of computed tokens.

        Returns:
            The number of tokens up to its end, and its queries; None where none is complete.
        """
        size = self._method.block_rows
        if not size or self.points or not self._observed:
            return None
        end = (self._observed_from // size + 1) * size
        if end > computed or end >= self.first_point:
            return None
        queries, rows = self._all_observed(), end - self._observed_from
        self._observed, self._observed_from = [queries[:, rows:]], end
        return end, queries[:, :rows]

    def take(self) -> Float32Array:
        """Return the queries of the last observed rows before a point in order, and forget all."""
        queries, self._observed = self._all_observed(), []
        return queries[:, max(0, queries.shape[1] - self._method.observed_rows) :]

    def pass_point(self, point: int) -> None:
        """Note that it has decided."""
        self.points += 1
        self.last_point = point

    def restart(self) -> None:
        """Begin again, since the sequence holds no KV any more."""
        if isinstance(self._method, RecallingMethod):
            self._recalled, self.compressor = self._method.recall(self._tokens, self._tenant)
        else:
            self.compressor = self._method.start(self._config)
        self.points = self.last_point = 0
        self._observed = []

    def fork(self) -> "CompressionState":
        """Return a state for another answer to the same prompt, which has the same KV."""
        other = CompressionState(self._method, self._config, self._tokens, self._tenant)
        other.compressor = self.compressor.fork()
        other.points, other.last_point = self.points, self.last_point
        return other

    def _all_observed(self) -> Float32Array:
        if not self._observed:
            return np.zeros((0, 0, 0, 0), np.float32)
        if len(self._observed) == 1:
            return self._observed[0]
        return np.concatenate(self._observed, axis=1)
