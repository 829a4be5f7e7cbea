"""CompressKV's measurements: which heads find evidence, and how much eviction harms each layer.

Needles are hidden in texts of several lengths, at several depths, and asked for at the end. Where
the greedy answer repeats enough of the needle, each generated token that is one of the needle's
adds to every head's score the attention that its row pays to the whole needle, as often as the
needle has the token (section 3.2 of the paper). Then, over the full cache, each layer's output is
compared with what it would be over the few tokens that its heads choose and the answer's, after the
output projection (section 3.3).
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.config import ModelOptions
from midfill.errors import InvalidRequestError, MidfillError
from midfill.methods.calibration import Tables
from midfill.methods.evict.compresskv import NAME, VERSION, vote
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.window_attention import head_attention, window_attention
from midfill.methods.model_probe import ModelProbe
from midfill.methods.needles import NeedleText, needle_text
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.loading import load_runner
from midfill.system.progress import Progress

_ANSWER_TOKENS = 50
_MIN_RECALL = 0.5
_EPSILON = 1e-5


@dataclass(frozen=True)
class EvidenceSearch:
    """The settings of a measurement; implements ``Calibrator``.

    Attributes:
        samples: texts for the scores of heads.
        outputs: texts for the errors of layers.
        tokens: of the longest texts.
        words: of a needle.
        budget: tokens that a layer keeps while its error is measured; the paper's 32.
        heads, window, kernel: see ``CompressKV``.
        seed: of the texts.
    """

    samples: int = 24
    outputs: int = 6
    tokens: int = 1200
    words: int = 8
    budget: int = 32
    heads: int = 4
    window: int = 8
    kernel: int = 5
    seed: int = 0

    version: ClassVar[int] = VERSION

    def __post_init__(self) -> None:
        for name in ("samples", "outputs", "tokens", "words", "heads", "window", "kernel"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1", param="method")
        if self.budget <= self.window:
            raise InvalidRequestError("budget must be above the window", param="method")

    def open(self, checkpoint: Checkpoint, progress: Progress) -> "EvidenceSearchWork":
        """See ``Calibrator.open``."""
        FullLayers.required_by(NAME, checkpoint.config)
        context = min(self.tokens + 2 * _ANSWER_TOKENS, checkpoint.config.context)
        runner = load_runner(checkpoint, ModelOptions(context=context), progress)
        return EvidenceSearchWork(self, checkpoint, ModelProbe(runner))


@dataclass(frozen=True)
class EvidenceSearchWork:
    """A measurement with its model; implements ``CalibrationWork``. A step is a text.

    Attributes:
        search: the settings.
        checkpoint: the model.
        probe: runs it.
    """

    search: EvidenceSearch
    checkpoint: Checkpoint
    probe: ModelProbe

    @property
    def steps(self) -> int:
        """One per text."""
        return self.search.samples + self.search.outputs

    def start(self) -> Tables:
        """Return zeros: "heads" [layers, query_heads], "errors" [layers], "counted" [1]."""
        config = self.checkpoint.config
        return {
            "heads": np.zeros((config.layers, config.query_heads)),
            "errors": np.zeros(config.layers),
            "counted": np.zeros(1),
        }

    def step(self, number: int, tables: Tables) -> Tables:
        """Return the tables with one more text in the mean scores of heads, or in the errors.

        Raises:
            MidfillError: the model has repeated no needle, so there is nothing to rank heads by.
        """
        search = self.search
        text = needle_text(
            self.checkpoint.tokenizer, search.tokens, search.words, number, search.seed
        )
        if number >= search.samples:
            if not tables["counted"][0]:
                raise MidfillError(
                    f"{NAME}: the model answered none of {search.samples} questions, so its heads"
                    " can't be told apart"
                )
            errors = self._output_errors(text, tables["heads"])
            return {**tables, "errors": tables["errors"] + errors}
        prompt = len(text.token_ids)
        full, queries = self._answer(text)
        answer = full[prompt:]
        if recall(answer, text.answer) <= _MIN_RECALL:
            return tables
        keys = self.probe.keys(len(full) - 1)
        scores = np.stack(
            [
                evidence_scores(window_attention(keys, queries, layer), answer, text)
                for layer in range(len(tables["errors"]))
            ]
        )
        counted = tables["counted"] + 1
        return {
            **tables,
            "heads": tables["heads"] + (scores - tables["heads"]) / counted[0],
            "counted": counted,
        }

    def close(self) -> None:
        """End the runner's threads."""
        self.probe.close()

    def _answer(self, text: NeedleText) -> tuple[Int32Array, Float32Array]:
        """Return the text with its greedy answer, and the queries of the rows that wrote it."""
        prompt = len(text.token_ids)
        self.probe.queries(text.token_ids, 0, prompt - 1)
        count = min(_ANSWER_TOKENS, 2 * len(text.answer))
        ends = self.checkpoint.config.eos_token_ids
        answer = self.probe.greedy(text.token_ids, count, ends)
        full = np.concatenate((text.token_ids, answer))
        if not len(answer):
            return full, np.zeros((0, 0, 0, 0), np.float32)
        return full, self.probe.queries(full[:-1], prompt - 1, prompt - 1)

    def _output_errors(self, text: NeedleText, scores: Float64Array) -> Float64Array:
        """Return the sum over rows of each layer's relative error: [layers]."""
        search, config = self.search, self.checkpoint.config
        prompt = len(text.token_ids)
        window = self.probe.queries(text.token_ids, 0, prompt - search.window)
        kept = [
            vote(
                self.probe.keys(prompt), window, layer,
                tuple(np.argsort(-scores[layer], kind="stable")[: search.heads].tolist()),
                search.budget, search.kernel,
            )
            for layer in range(config.layers)
        ]  # fmt: skip
        full, queries = self._answer(text)
        keys = self.probe.keys(len(full) - 1)
        errors = np.zeros(config.layers)
        for layer in range(config.layers) if len(full) > prompt + 1 else ():
            seen = np.zeros(len(full) - 1, bool)
            seen[kept[layer]] = True
            seen[prompt:] = True
            whole, part = [], []
            for kv_head in range(config.kv_heads):
                head = layer * config.kv_heads + kv_head
                _, values = keys.read(head)
                weights = head_attention(keys, queries[:, 1:], head)
                whole.append(weights @ values)
                few = np.where(seen, weights, 0)
                part.append(few / few.sum(axis=-1, keepdims=True) @ values)
            output = self.checkpoint.tensor(f"layers.{layer}.o.weight").to_float32()
            errors[layer] = relative_errors(whole, part, output)
        return errors


def recall(answer: Int32Array, expected: Int32Array) -> float:
    """Return which share of the expected tokens the answer has: ROUGE-1's recall, in tokens."""
    found = Counter(answer.tolist()) & Counter(expected.tolist())
    return found.total() / len(expected)


def evidence_scores(weights: Float32Array, answer: Int32Array, text: NeedleText) -> Float64Array:
    """Return what an answer adds to the scores of a layer's heads: [query_heads].

    Args:
        weights: float32 [query_heads, rows, keys], of the rows that wrote the answer.
        answer: [rows] int32.
        text: what it answers.
    """
    first, end = text.needle
    occurrences = Counter(text.token_ids[first:end].tolist())
    times = np.array([occurrences[token] for token in answer.tolist()], np.float64)
    mass = weights[:, :, first:end].sum(axis=-1, dtype=np.float64)
    scores: Float64Array = mass @ times
    return scores


def relative_errors(
    whole: list[Float32Array], part: list[Float32Array], output: Float32Array
) -> float:
    """Return the sum over rows of ||part - whole|| / ||whole||, after the output projection.

    Args:
        whole, part: attention outputs of each KV head: [query heads, rows, head_dim].
        output: [hidden, query_heads * head_dim].
    """
    wide, narrow = (np.concatenate(each).transpose(1, 0, 2) for each in (whole, part))
    wide, narrow = (each.reshape(len(each), -1) @ output.T for each in (wide, narrow))
    difference = np.linalg.norm(narrow - wide, axis=1)
    return float((difference / (np.linalg.norm(wide, axis=1) + _EPSILON)).sum())
