"""UNComp's measurement: the truncated matrix entropy of each head's queries.

The entropy of the spectrum of the queries' covariance says how many directions a head's queries
use. Over the whole spectrum all heads are much alike; the largest eigenvalues tell them apart
(section 3.1 of the paper). It keeps 32 of 128; the default here is as large a part of any head.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from midfill.arrays import Float32Array, Float64Array
from midfill.config import ModelOptions
from midfill.errors import InvalidRequestError
from midfill.methods.calibration import Tables
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.uncomp import NAME, VERSION
from midfill.methods.model_probe import ModelProbe
from midfill.methods.needles import needle_text
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.loading import load_runner
from midfill.system.progress import Progress

_WORDS = 8
_SMALLEST = 1e-10


@dataclass(frozen=True)
class EntropyMeasurement:
    """The settings of a measurement; implements ``Calibrator``.

    Attributes:
        texts: how many.
        tokens: of the longest.
        share: how many of the largest eigenvalues count, as a share of a head's dimensions; the
            paper's 1/4.
        seed: of the texts.
    """

    texts: int = 15
    tokens: int = 1200
    share: float = 0.25
    seed: int = 0

    version: ClassVar[int] = VERSION

    def __post_init__(self) -> None:
        for name in ("texts", "tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1", param="method")
        if not 0 < self.share <= 1:
            raise InvalidRequestError(
                f"share must be above 0 and at most 1, not {self.share:g}", param="method"
            )

    def open(self, checkpoint: Checkpoint, progress: Progress) -> "EntropyWork":
        """See ``Calibrator.open``."""
        FullLayers.required_by(NAME, checkpoint.config)
        context = min(self.tokens + 100, checkpoint.config.context)
        runner = load_runner(checkpoint, ModelOptions(context=context), progress)
        return EntropyWork(self, checkpoint, ModelProbe(runner))


@dataclass(frozen=True)
class EntropyWork:
    """A measurement with its model; implements ``CalibrationWork``. A step is a text.

    Attributes:
        measurement: the settings.
        checkpoint: the model.
        probe: runs it.
    """

    measurement: EntropyMeasurement
    checkpoint: Checkpoint
    probe: ModelProbe

    @property
    def steps(self) -> int:
        """One per text."""
        return self.measurement.texts

    def start(self) -> Tables:
        """Return zeros [layers, kv_heads]: how often a head was in the upper half, mean entropy."""
        shape = (self.checkpoint.config.layers, self.checkpoint.config.kv_heads)
        return {"marks": np.zeros(shape), "entropy": np.zeros(shape)}

    def step(self, number: int, tables: Tables) -> Tables:
        """Return the tables with one more text."""
        settings, config = self.measurement, self.checkpoint.config
        tokenizer = self.checkpoint.tokenizer
        text = needle_text(tokenizer, settings.tokens, _WORDS, number, settings.seed)
        queries = self.probe.queries(text.token_ids, 0, 0)
        kept = max(1, round(settings.share * config.head_dim))
        entropy = np.stack([layer_entropy(layer, kept, config.kv_heads) for layer in queries])
        return {
            "marks": tables["marks"] + upper_half(entropy),
            "entropy": tables["entropy"] + (entropy - tables["entropy"]) / (number + 1),
        }

    def close(self) -> None:
        """End the runner's threads."""
        self.probe.close()


def layer_entropy(queries: Float32Array, kept: int, kv_heads: int) -> Float64Array:
    """Return the mean entropy of the query heads of each KV head: [kv_heads].

    Args:
        queries: [rows, query_heads, head_dim].
        kept: see ``matrix_entropy``.
        kv_heads: of the model.
    """
    entropy: Float64Array = matrix_entropy(queries.transpose(1, 0, 2), kept)
    mean: Float64Array = entropy.reshape(kv_heads, -1).mean(axis=1)
    return mean


def upper_half(entropy: Float64Array) -> Float64Array:
    """Return 1 for the heads of each layer's upper half (rounded up), else 0: [layers, heads]."""
    marks = np.zeros_like(entropy)
    half = (entropy.shape[1] + 1) // 2
    np.put_along_axis(marks, np.argsort(-entropy, axis=1, kind="stable")[:, :half], 1, axis=1)
    return marks


def matrix_entropy(rows: Float32Array, kept: int) -> Float64Array:
    """Return the truncated matrix entropy of rows [..., n, d], from 0 to about 1.

    Rows are centred and normalised; the eigenvalues of their covariance, which add up to 1, enter
    as -s log s / log d.

    Args:
        rows: any numbers; equal rows have entropy 0.
        kept: how many of the largest eigenvalues count.
    """
    centred = rows.astype(np.float64)
    centred -= centred.mean(axis=-2, keepdims=True)
    norms = np.linalg.norm(centred, axis=-1, keepdims=True)
    centred /= np.where(norms > _SMALLEST, norms, 1)
    covariance = np.swapaxes(centred, -1, -2) @ centred / rows.shape[-2]
    trace = np.trace(covariance, axis1=-2, axis2=-1)[..., None]
    spectrum = np.linalg.eigvalsh(covariance)[..., ::-1][..., :kept]
    spectrum = np.maximum(spectrum / np.where(trace > _SMALLEST, trace, 1), _SMALLEST)
    entropy: Float64Array = -(spectrum * np.log(spectrum)).sum(-1) / np.log(rows.shape[-1])
    return entropy
