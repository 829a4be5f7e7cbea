"""What pools of few bits would lose on the default model, beside the one of 4 bits that there is.

A pool has to hold the same bytes for a prefix whatever comes after it and whoever reads it. So an
entry may depend on its own token and earlier ones alone, and every row reads entries, its own
included. Formats are rounded to in PyTorch: this is what they stand for, not how fast they are.
-s shows their bytes and KL from exact KV.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from default_model import DefaultModel
from four_bit_entries import hadamard_matrix

from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.runners.torch.decoder import Decoder, PreparedBatch
from midfill.runners.torch.runner import TorchRunner, load_torch_runner

pytestmark = [
    pytest.mark.slow, pytest.mark.quality, pytest.mark.real_model, pytest.mark.timeout(900),
]  # fmt: skip

TEXTS, TOKENS, SCORED = int(os.environ.get("TEXTS", "2")), 512, 256
STUDENT = {2: 12.706, 3: 4.303, 6: 2.571}[TEXTS]
"""97.5% quantile of Student's distribution with ``TEXTS`` - 1 degrees of freedom."""
TRANSFORM = torch.from_numpy(hadamard_matrix(64).astype(np.float32))

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Rounds keys or values [tokens, kv_heads, head_dim], each by itself."""


def pool_of_4_bits(vectors: torch.Tensor) -> torch.Tensor:
    """Round to what ``--kv-cache-dtype i4`` holds: quants -8..7 of the transform, and a scale."""
    turned = vectors @ TRANSFORM
    largest = turned.gather(-1, turned.abs().argmax(-1, keepdim=True))
    scale = torch.where(largest == 0, 1.0, largest / -8)
    return (turned / scale).round().clamp(-8, 7) * scale @ TRANSFORM


_STEPS = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
}
"""Lloyd and Max's levels above 0 for a normal distribution, to which the transform is near."""


def best_levels(bits: int) -> Rounding:
    """Return what rounds the transform to 2^bits levels, and keeps the root of its mean square."""
    levels = torch.tensor(sorted(sign * step for step in _STEPS[bits] for sign in (-1, 1)))
    bounds = (levels[1:] + levels[:-1]) / 2

    def rounded(vectors: torch.Tensor) -> torch.Tensor:
        turned = vectors @ TRANSFORM
        scale = turned.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-9)
        return levels[torch.bucketize(turned / scale, bounds)] * scale @ TRANSFORM

    return rounded


def by_range(vectors: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Round to 2^bits steps from the smallest to the largest number along an axis, as KIVI does."""
    low, high = vectors.amin(axis, keepdim=True), vectors.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
    return ((vectors - low) / scale).round() * scale + low


@dataclass(frozen=True)
class PerToken:
    """A pool each of whose entries depends on its token alone."""

    keys: Rounding
    values: Rounding

    def attend(
        self, plain: Decoder, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:  # fmt: skip
        """See ``Decoder.attend``."""
        return Decoder.attend(plain, index, q, self.keys(k), self.values(v), batch)


@dataclass(frozen=True)
class Groups:
    """A pool of KIVI's blocks: keys of ``group`` tokens, counted from the text's first, share a
    scale and a zero per channel. Rows see their own group exactly, which can't be complete."""

    bits: int
    group: int

    def attend(
        self, plain: Decoder, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:  # fmt: skip
        """See ``Decoder.attend``; the rows are all of a text's."""
        repeat = q.shape[1] // k.shape[1]
        exact, rounded = (
            [part.repeat_interleave(repeat, 1).transpose(0, 1) for part in pair]
            for pair in ((k, v), (self._rounded(k, 0), by_range(v, self.bits, -1)))
        )
        number = torch.arange(len(q))
        own = number[:, None] // self.group == number // self.group
        scores = [q.transpose(0, 1) @ keys.transpose(1, 2) for keys, _ in (exact, rounded)]
        chosen = torch.where(own, *scores) * plain.config.score_scale
        chosen = chosen.masked_fill(number > number[:, None], -torch.inf)
        weights = chosen.softmax(-1)
        found = (weights * own) @ exact[1] + (weights * ~own) @ rounded[1]
        return found.transpose(0, 1)

    def _rounded(self, keys: torch.Tensor, axis: int) -> torch.Tensor:
        groups = [by_range(part, self.bits, axis) for part in keys.split(self.group)]
        return torch.cat(groups)


FORMATS: dict[str, tuple[float, PerToken | Groups]] = {
    "i4": (72, PerToken(pool_of_4_bits, pool_of_4_bits)),
    "3 bits per token": (56, PerToken(best_levels(3), best_levels(3))),
    "keys in 4, values in 2 bits": (56, PerToken(pool_of_4_bits, best_levels(2))),
    "2 bits per token": (40, PerToken(best_levels(2), best_levels(2))),
    "groups of 32 tokens, 4 bits": (76, Groups(4, 32)),
    "groups of 32 tokens, 2 bits": (44, Groups(2, 32)),
}
"""Bytes per token and head of 64 dimensions, scales included, and the format."""


class RoundedDecoder:
    """A model whose attention reads what a format holds of its keys and values."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def logprobs(self, tokens: list[int], format: PerToken | Groups | None) -> np.ndarray:
        """Return the distributions [SCORED, vocab] after each of a text's last tokens."""
        runner, decoder = self._runner, self._runner.decoder
        if format is not None:
            vars(decoder)["attend"] = lambda *given: format.attend(decoder, *given)
        slots, ends = np.arange(TOKENS, dtype=np.int32), np.array([0, TOKENS], np.int32)
        ids = np.array(tokens, np.int32)
        batch = ForwardBatch(ids, slots, slots, ends, ends, slots, slots[-SCORED:])
        try:
            return log_softmax(runner.logits_ops.to_numpy(runner.forward(batch)))
        finally:
            vars(decoder).pop("attend", None)


@pytest.fixture(scope="module")
def divergence(default_model: DefaultModel) -> dict[str, np.ndarray]:
    """Each format's mean KL per token from exact KV, by text."""
    decoder = RoundedDecoder(load_torch_runner(default_model.checkpoint, slots=TOKENS))
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    for number in range(TEXTS):
        text = default_model.haystacks.hide(100 + number, TOKENS + 64, [])[:TOKENS]
        exact = decoder.logprobs(text, None)
        for name, (_, format) in FORMATS.items():
            other = decoder.logprobs(text, format)
            found[name].append(float((np.exp(exact) * (exact - other)).sum(axis=1).mean()))
    result = {name: np.array(each) for name, each in found.items()}
    print()
    for name, (size, _) in FORMATS.items():
        each = result[name]
        print(f"{name:30} {size:3} bytes  {each.mean():.4f} ±{radius(each):.4f}")
    return result


def radius(numbers: np.ndarray) -> float:
    """Return the half width of the 95% interval of a mean."""
    return float(STUDENT * numbers.std(ddof=1) / np.sqrt(len(numbers)))


def test_fewer_bits_than_4_lose_several_times_as_much(divergence: dict[str, np.ndarray]) -> None:
    """In every text; and so do 4 bits per token beside groups of tokens."""
    four, groups = divergence["i4"], divergence["groups of 32 tokens, 4 bits"]
    for name, found in divergence.items():
        if FORMATS[name][0] < 72:
            assert (found > 2 * four).all(), name
    assert (four > 4 * groups).all()
    assert divergence["2 bits per token"].mean() > 10 * four.mean()
    assert (divergence["groups of 32 tokens, 2 bits"] < divergence["2 bits per token"]).all()
