"""EpiCache's measurement: how much the keys of each layer change when far text is hidden.

Over English prose, keys are computed twice: each row sees everything before it, or only its own
block, the last half of the block before and the text's first tokens. A layer's similarity is the
mean cosine of both, over its heads and over runs of tokens whose keys are taken as one vector.
"""

import random
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import ClassVar

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.config import ModelOptions
from midfill.errors import InvalidRequestError
from midfill.kv.ragged import cells_of_slots
from midfill.methods.calibration import Tables
from midfill.methods.episodes.epicache import VERSION
from midfill.methods.evict.full_layers import FullLayers
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from midfill.runners.loading import load_runner
from midfill.system.progress import Progress


@dataclass(frozen=True)
class HiddenText:
    """The settings of a measurement; implements ``Calibrator``.

    Attributes:
        texts: how many; the paper's 1.
        tokens: of each.
        block: tokens of a block; the paper's 4096, of a book.
        first: tokens that every row sees; the paper's 128.
        run: tokens whose keys are compared as one vector; the paper's 100.
        seed: of the texts' order.
    """

    texts: int = 4
    tokens: int = 2048
    block: int = 256
    first: int = 8
    run: int = 100
    seed: int = 0

    version: ClassVar[int] = VERSION

    def __post_init__(self) -> None:
        for name in ("texts", "tokens", "block", "first", "run"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1", param="method")
        if self.tokens <= 2 * self.block:
            raise InvalidRequestError("tokens must be above two blocks", param="method")

    def open(self, checkpoint: Checkpoint, progress: Progress) -> "HiddenTextWork":
        """See ``Calibrator.open``."""
        context = min(self.tokens + 1, checkpoint.config.context)
        runner = load_runner(checkpoint, ModelOptions(context=context), progress)
        return HiddenTextWork(self, checkpoint, runner)


@dataclass(frozen=True)
class HiddenTextWork:
    """A measurement with its model; implements ``CalibrationWork``. A step is a text.

    Attributes:
        settings: see above.
        checkpoint: the model.
        runner: runs it.
    """

    settings: HiddenText
    checkpoint: Checkpoint
    runner: Runner

    @property
    def steps(self) -> int:
        """One per text."""
        return self.settings.texts

    def start(self) -> Tables:
        """Return zeros [layers], of those that see everything."""
        return {"similarity": np.zeros(FullLayers(self.checkpoint.config).config.layers)}

    def step(self, number: int, tables: Tables) -> Tables:
        """Return the mean with one more text."""
        settings = self.settings
        tokens = np.array(self.checkpoint.tokenizer.encode(prose(number, settings)), np.int32)
        tokens = tokens[: min(settings.tokens, self.checkpoint.config.context)]
        full = self._keys(tokens, hides=False)
        found = similarities(full, self._keys(tokens, hides=True), settings.run)
        mean = tables["similarity"]
        return {"similarity": mean + (found - mean) / (number + 1)}

    def close(self) -> None:
        """End the runner's threads."""
        close = getattr(self.runner, "close", None)
        if close is not None:
            close()

    def _keys(self, tokens: Int32Array, *, hides: bool) -> Float32Array:
        """Return the keys of a text: [layers, kv_heads, n, head_dim].

        Args:
            tokens: [n] int32.
            hides: whether rows see only what is near them.
        """
        runner, settings, count = self.runner, self.settings, len(tokens)
        for start in range(0, count, settings.block):
            end = min(start + settings.block, count)
            near = seen_by(start, settings) if hides else np.arange(start, dtype=np.int32)
            rows = np.arange(start, end, dtype=np.int32)
            slots = np.concatenate((near, rows))
            ends = [np.array([0, len(each)], np.int32) for each in (rows, slots)]
            runner.forward(
                ForwardBatch(tokens[start:end], rows, rows, ends[0], ends[1], slots, rows[:0])
            )
        config = runner.config
        cells = cells_of_slots(
            np.arange(count, dtype=np.int32), config.layers * config.kv_heads, runner.slots
        )
        keys = np.stack([runner.cells.read_keys(head) for head in cells])
        shaped = keys.reshape(config.layers, config.kv_heads, count, config.head_dim)
        windows = [config.window_of(layer) for layer in range(config.layers)]
        full = [layer for layer, window in enumerate(windows) if window is None]
        return shaped[full] if full else shaped


def seen_by(start: int, settings: HiddenText) -> Int32Array:
    """Return which tokens before its own block a row sees that begins at ``start``: ascending."""
    near = np.arange(max(start - settings.block // 2, 0), start)
    found: Int32Array = np.union1d(np.arange(min(settings.first, start)), near).astype(np.int32)
    return found


def similarities(full: Float32Array, hidden: Float32Array, run: int) -> Float64Array:
    """Return the mean cosine of two sets of keys, each run of tokens as one vector: [layers].

    Args:
        full, hidden: [layers, kv_heads, n, head_dim].
        run: tokens per vector; what is left of n counts as one, too.
    """
    found = []
    for start in range(0, full.shape[2], run):
        one, other = (
            each[:, :, start : start + run].reshape(*each.shape[:2], -1).astype(np.float64)
            for each in (full, hidden)
        )
        lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
        found.append((one * other).sum(axis=-1) / np.maximum(lengths, 1e-12))
    mean: Float64Array = np.stack(found).mean(axis=(0, 2))
    return mean


def prose(number: int, settings: HiddenText) -> str:
    """Return one of several texts of English prose: the topics of Python's help, in any order."""
    names = sorted(topics)
    random.Random(f"{settings.seed} {number}").shuffle(names)
    text, wanted = "", 8 * settings.tokens  # characters, more than tokens ever are of prose
    for name in names:
        if len(text) >= wanted:
            break
        text += topics[name]
    return text[:wanted]
