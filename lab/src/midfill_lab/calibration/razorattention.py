"""RazorAttention's head search: which heads attend to earlier occurrences of what they read.

Random tokens are repeated several times. A head's echo score is the attention that a token pays to
its earlier occurrences, its induction score the attention to the tokens right after these; both are
means over the queries from the second repetition on, as in section 3.2 of the paper. It takes 2,500
tokens four times; the default here is smaller, and repeats the measurement with other tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.config import ModelOptions
from midfill.errors import InvalidRequestError
from midfill.methods.calibration import Tables
from midfill.methods.evict.razorattention import NAME, VERSION
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.methods.evict.window_attention import window_attention
from midfill.methods.model_probe import ModelProbe
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.loading import load_runner
from midfill.system.progress import Progress

_CHUNK_ROWS = 128


@dataclass(frozen=True)
class HeadSearch:
    """The settings of a search; implements ``Calibrator``.

    Attributes:
        tokens: random tokens; as many as fit if the context is too short for all repetitions.
        repeats: how often they occur.
        draws: how many times the search is repeated with other tokens.
        seed: of the tokens.
    """

    tokens: int = 600
    repeats: int = 4
    draws: int = 3
    seed: int = 0

    version: ClassVar[int] = VERSION

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("repeats", 2), ("draws", 1)):
            if getattr(self, name) < least:
                raise InvalidRequestError(f"{name} must be at least {least}", param="method")

    def open(self, checkpoint: Checkpoint, progress: Progress) -> "HeadSearchWork":
        """See ``Calibrator.open``."""
        config = checkpoint.config
        refuse_windows(NAME, config)
        start = () if config.bos_token_id is None else (config.bos_token_id,)
        tokens = min(self.tokens, (config.context - len(start) - 1) // self.repeats)
        length = len(start) + tokens * self.repeats
        runner = load_runner(checkpoint, ModelOptions(context=length + 1), progress)
        return HeadSearchWork(self, ModelProbe(runner), tokens, start)


@dataclass(frozen=True)
class HeadSearchWork:
    """A search with its model; implements ``CalibrationWork``. A step is a draw of tokens.

    Attributes:
        search: the settings.
        probe: runs the model.
        tokens: random tokens that are repeated.
        first: tokens before them.
    """

    search: HeadSearch
    probe: ModelProbe
    tokens: int
    first: tuple[int, ...]

    @property
    def steps(self) -> int:
        """One per draw."""
        return self.search.draws

    def start(self) -> Tables:
        """Return zeros [layers, query_heads]."""
        shape = (self.probe.runner.config.layers, self.probe.runner.config.query_heads)
        return {"induction": np.zeros(shape), "echo": np.zeros(shape)}

    def step(self, number: int, tables: Tables) -> Tables:
        """Return the mean of the scores so far and those of one more draw."""
        rng = np.random.default_rng([self.search.seed, number])
        drawn = rng.integers(0, self.probe.runner.config.vocab, self.tokens)
        text = [*self.first, *np.tile(drawn, self.search.repeats).tolist()]
        scores = repetition_scores(
            self.probe, np.array(text, np.int32), self.tokens, len(self.first)
        )
        return {
            name: tables[name] + (scores[name] - tables[name]) / (number + 1) for name in tables
        }

    def close(self) -> None:
        """End the runner's threads."""
        self.probe.close()


def repetition_scores(probe: ModelProbe, text: Int32Array, period: int, start: int) -> Tables:
    """Return each query head's echo and induction score, [layers, query_heads] float64.

    Args:
        probe: runs the model.
        text: [n] int32; from ``start`` on a repetition of its first ``period`` tokens.
        period: how many tokens are repeated.
        start: tokens before them.
    """
    config = probe.runner.config
    sums = {name: np.zeros((config.layers, config.query_heads)) for name in ("echo", "induction")}
    first = start + period
    # Chunk by chunk: the attention of all rows to all keys would be too much memory.
    for begin in range(0, len(text), _CHUNK_ROWS):
        end = min(begin + _CHUNK_ROWS, len(text))
        rows = np.arange(max(begin, first), end, dtype=np.int32)
        queries = probe.queries(text[:end], begin, min(max(begin, first), end - 1))
        if not len(rows):
            continue
        keys = probe.keys(end)
        for layer in range(config.layers):
            weights = window_attention(keys, queries, layer)
            sums["echo"][layer] += _attention_to(weights, rows, period, start, 0)
            sums["induction"][layer] += _attention_to(weights, rows, period, start, 1)
    return {name: total / (len(text) - first) for name, total in sums.items()}


def _attention_to(
    weights: Float32Array, rows: Int32Array, period: int, start: int, offset: int
) -> Float64Array:
    """Return each head's attention to the keys ``offset`` after earlier occurrences of the rows.

    Args:
        weights: [query_heads, rows, keys].
        rows: [rows], their places in the text.
        period, start: see ``repetition_scores``.
        offset: 0 for the occurrences, 1 for the tokens after them.
    """
    total: Float64Array = np.zeros(len(weights))
    place = np.arange(len(rows))
    for back in range(period, int(rows[-1]) - start + 1, period):
        exists = rows - back >= start
        found = weights[:, place[exists], rows[exists] - back + offset]
        total += found.sum(axis=1, dtype=np.float64)
    return total
