"""DuoAttention's gates: one per KV head, trained so that streaming changes the model least.

Section 2.2 of the paper: a head's attention is the mixture gate * full + (1 - gate) * streaming.
The gates start at 1 and are pulled to 0 by a penalty, against the squared difference that the
mixture makes in the last hidden states, at the tokens that repeat passkeys from far back in the
text. The weights don't change.

The paper trains 2,000 steps on texts of up to 32,000 tokens with 10 passkeys of 32 words, 128 sinks
and 256 recent tokens, on eight GPUs. The defaults here are what a CPU does in minutes: short texts,
with sinks and a window as much smaller, and fewer, larger steps. The text is source code of
Python's standard library.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional

from midfill.arrays import Int32Array
from midfill.errors import InvalidRequestError
from midfill.methods.calibration import Tables
from midfill.methods.evict.duoattention import NAME, VERSION
from midfill.methods.evict.streaming_heads import refuse_windows
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import ModelConfig
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache, PreparedBatch
from midfill.runners.torch.weights import DecoderWeights, load_weights
from midfill.system.progress import Progress

# fmt: off
_WORDS = (
    "alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett",
    "kilo", "lima", "mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango",
    "uniform", "victor", "whiskey", "xray", "yankee", "zulu",
)
_NAMES = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
)
# fmt: on
_MODULES = ("argparse", "difflib", "doctest", "optparse", "pdb", "tarfile")
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_RAMP, _MIN_RATE = 0.2, 0.1  # the rate rises and falls over this share of the steps


@dataclass(frozen=True)
class GateTraining:
    """The settings of a training; implements ``Calibrator``.

    Attributes:
        steps: updates, each with one text; the paper's 2,000.
        tokens: of a text before its questions.
        passkeys: how many are hidden in a text; the paper's 10.
        words: of a passkey; the paper's 32.
        sinks, recent: what streaming heads see.
        rate: learning rate of AdamW; the paper's 0.02.
        penalty: weight of the gates' mean; the paper's 0.05.
        seed: of the texts.
    """

    steps: int = 48
    tokens: int = 128
    passkeys: int = 2
    words: int = 4
    sinks: int = 4
    recent: int = 32
    rate: float = 0.04
    penalty: float = 0.05
    seed: int = 0

    version: ClassVar[int] = VERSION

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1), ("tokens", 16), ("passkeys", 1), ("words", 1), ("sinks", 0), ("recent", 1)
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise InvalidRequestError(f"{name} must be at least {least}", param="method")
        if self.passkeys > len(_NAMES):
            raise InvalidRequestError(f"at most {len(_NAMES)} passkeys", param="method")
        if not (self.rate > 0 and self.penalty >= 0):
            raise InvalidRequestError("rate must be above 0, penalty at least 0", param="method")

    def open(self, checkpoint: Checkpoint, progress: Progress) -> "GateTrainingWork":
        """See ``Calibrator.open``."""
        refuse_windows(NAME, checkpoint.config)
        progress("loading weights", 0, 1)
        weights = load_weights(checkpoint, torch.device("cpu"), torch.float32)
        return GateTrainingWork(self, checkpoint.config, weights, checkpoint.tokenizer)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of step ``step``, from 0: it rises, stays and falls."""
        ramp = max(self.steps * _RAMP, 1)
        share = min((step + 1) / ramp, (self.steps - step) / ramp, 1.0)
        return self.rate * max(share, _MIN_RATE)


@dataclass(frozen=True)
class RecallText:
    """A text with passkeys, and questions for them.

    Attributes:
        token_ids: [n] int32.
        questions: number of its last tokens that belong to the questions and their answers.
    """

    token_ids: Int32Array
    questions: int


class GateTrainingWork:
    """A training with its model; implements ``CalibrationWork``. A step is one update.

    Args:
        training: the settings.
        config: the model.
        weights: of the model, float32.
        tokenizer: of the model.
    """

    def __init__(
        self,
        training: GateTraining,
        config: ModelConfig,
        weights: DecoderWeights,
        tokenizer: Tokenizer,
    ) -> None:
        self._training = training
        self._tokenizer = tokenizer
        self._decoder = GatedDecoder(config, weights, training.sinks, training.recent)

    @property
    def steps(self) -> int:
        """Updates."""
        return self._training.steps

    def start(self) -> Tables:
        """Return gates of 1, [layers, kv_heads], and AdamW's moments."""
        shape = (self._decoder.config.layers, self._decoder.config.kv_heads)
        return {
            "gates": np.ones(shape),
            "moment": np.zeros(shape),
            "square": np.zeros(shape),
            "losses": np.zeros(0),
        }

    def step(self, number: int, tables: Tables) -> Tables:
        """Return the tables after one update of AdamW without weight decay."""
        training = self._training
        text = self.text(number)
        gates = torch.from_numpy(np.clip(tables["gates"], 0.0, 1.0)).float().requires_grad_()
        loss = self._decoder.distillation_loss(text, gates)
        (slope,) = torch.autograd.grad(loss + training.penalty * gates.abs().mean(), gates)
        gradient = slope.double().numpy()
        first, second = _BETAS
        moment = first * tables["moment"] + (1 - first) * gradient
        square = second * tables["square"] + (1 - second) * gradient**2
        mean = moment / (1 - first ** (number + 1))
        deviation = np.sqrt(square / (1 - second ** (number + 1))) + _EPSILON
        updated = gates.detach().double().numpy() - training.rate_at(number) * mean / deviation
        return {
            "gates": np.clip(updated, 0.0, 1.0),
            "moment": moment,
            "square": square,
            "losses": np.append(tables["losses"], float(loss.detach())),
        }

    def text(self, number: int) -> RecallText:
        """Return the text of a step."""
        rng = np.random.default_rng([self._training.seed, number])
        return recall_text(self._tokenizer, self._training, self._decoder.config.context, rng)

    def close(self) -> None:
        """Do nothing: the memory goes with the object."""


class GatedDecoder(Decoder):
    """A decoder whose KV heads mix full and streaming attention, over one text at a time.

    Args:
        config: the model.
        weights: of the model, on the CPU.
        sinks, recent: keys that streaming attention sees: the first ones, and the last ones with
            the row's own.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, sinks: int, recent: int
    ) -> None:
        cache = KVCache.empty(config, 1, weights.embed.device, weights.embed.dtype)
        super().__init__(config, weights, cache)
        self._sinks, self._recent = sinks, recent
        self._gates: torch.Tensor | None = None
        self._streams = torch.empty(0)

    def distillation_loss(self, text: RecallText, gates: torch.Tensor) -> torch.Tensor:
        """Return the mean squared difference of the last hidden states at the questions.

        Args:
            text: the text.
            gates: float32 [layers, kv_heads].
        """
        with torch.no_grad():
            target = self._last_hidden(text, None)
        return functional.mse_loss(self._last_hidden(text, gates), target)

    def attend(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PreparedBatch
    ) -> torch.Tensor:
        """See ``Decoder.attend``; nothing is written, since all rows are in the batch."""
        group = self.config.query_heads // self.config.kv_heads
        heads = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)]
        queries, keys, values = (each.transpose(0, 1)[None] for each in heads)
        scale = self.config.score_scale
        full = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale
        )[0].transpose(0, 1)
        if self._gates is None:
            return full
        streamed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._streams, scale=scale
        )[0].transpose(0, 1)
        gate = self._gates[index].repeat_interleave(group)[None, :, None]
        return gate * full + (1 - gate) * streamed

    def _last_hidden(self, text: RecallText, gates: torch.Tensor | None) -> torch.Tensor:
        """Return the normed hidden states of the questions' rows; None lets all heads see all."""
        count = len(text.token_ids)
        row, key = torch.arange(count)[:, None], torch.arange(count)
        near = key > row - self._recent
        self._streams = (key <= row) & (near | (key < self._sinks))
        self._gates = gates
        numbers, ends = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
        nothing = np.zeros(0, np.int32)
        batch = ForwardBatch(text.token_ids, numbers, numbers, ends, ends, numbers, nothing)
        hidden = self.run_layers(self.prepare(batch), self.embed(batch), 0, self.config.layers)
        return self._norm(hidden[count - text.questions :], self.weights.final_norm)


def recall_text(
    tokenizer: Tokenizer, training: GateTraining, context: int, rng: np.random.Generator
) -> RecallText:
    """Return source code with passkeys at random depths from 5% to 95%, then questions for them.

    Args:
        tokenizer: of the model.
        training: how long it is, and how many passkeys there are.
        context: maximum number of tokens.
        rng: decides the rest.
    """
    keys = [" ".join(rng.choice(_WORDS, training.words)) for _ in range(training.passkeys)]
    names = _NAMES[: training.passkeys]
    hidden = [
        tokenizer.encode(f"\n# The {name} passkey is {key}.\n")
        for name, key in zip(names, keys, strict=True)
    ]
    asked = "".join(
        f"\n# What is the {name} passkey?\n# The {name} passkey is {key}."
        for name, key in zip(names, keys, strict=True)
    )
    questions = tokenizer.encode(asked)
    room = min(training.tokens, context - len(questions)) - sum(map(len, hidden))
    if room < 2:
        raise InvalidRequestError("the text is too short for its passkeys", param="method")
    source = _source(int(rng.integers(len(_MODULES))))
    start = int(rng.integers(max(len(source) - 8 * room, 1)))
    hay = tokenizer.encode(source[start : start + 8 * room])[:room]
    depths = sorted(rng.integers(int(0.05 * len(hay)), int(0.95 * len(hay)) + 1, len(hidden)))
    ids: list[int] = []
    for begin, end, key in zip([0, *depths], depths, hidden, strict=False):
        ids += [*hay[begin:end], *key]
    ids += [*hay[depths[-1] :], *questions]
    return RecallText(np.array(ids, np.int32), len(questions))


@cache
def _source(module: int) -> str:
    """Return the source of one of some modules of the standard library."""
    spec = importlib.util.find_spec(_MODULES[module])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
