"""Latent attention in parts as its formulas say it, for tests: one text, all keys, no cache."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier

import numpy as np
import torch
from tiny_checkpoints import write_tiny
from torch.nn import functional

from midfill.arrays import Int32Array
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache, PreparedBatch
from midfill.runners.torch.latent_parts.calibration import calibrate, calibration_texts
from midfill.runners.torch.latent_parts.part import LatentPart, cut_weights
from midfill.runners.torch.latent_parts.rotation import LatentRotation
from midfill.runners.torch.weights import Affine, DecoderWeights, LatentWeights, load_weights

CPU = torch.device("cpu")


def hadamard_axes(rank: int, seed: int = 0) -> torch.Tensor:
    """Return random signs times Hadamard's matrix, by Sylvester's construction: [rank, rank]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < rank:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.randint(0, 2, (rank, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    axes: torch.Tensor = signs * matrix / rank**0.5
    return axes


def random_axes(rank: int, seed: int = 0) -> torch.Tensor:
    """Return a random orthogonal matrix [rank, rank]."""
    numbers = torch.randn(rank, rank, generator=torch.Generator().manual_seed(seed))
    axes: torch.Tensor = torch.linalg.qr(numbers).Q
    return axes


def energy_scales(shares: torch.Tensor) -> torch.Tensor:
    """Return the paper's mu by the parts' shares of the energy, at most 8: [layers, parts]."""
    return (1 / shares).clamp(max=8.0)


def planted(
    weights: DecoderWeights,
    rank: int,
    *,
    decay: float = 0.0,
    reached: int | None = None,
    sharpness: float = 1.0,
) -> DecoderWeights:
    """Return weights whose latents have more energy along some directions than along others.

    Args:
        weights: of a model with latent attention.
        rank: of its latents.
        decay: the energy falls by exp(-2 decay) from the first direction to the last.
        reached: how many directions have any; None is all.
        sharpness: factor of scores, but for their positional part.
    """
    factors = torch.exp(-decay * torch.arange(rank) / rank)
    if reached is not None:
        factors[reached:] = 0
    factors *= (rank / factors.square().sum()).sqrt()
    layers = []
    for number, layer in enumerate(weights.layers):
        assert isinstance(layer.qkv, LatentWeights)
        key = layer.qkv.key.weight.clone()
        key[:rank] = random_axes(rank, number) @ (factors[:, None] * key[:rank])
        layers.append(replace(layer, qkv=replace(
            layer.qkv, key=Affine(key), absorb=layer.qkv.absorb * sharpness,
        )))  # fmt: skip
    return replace(weights, layers=tuple(layers))


class NaiveParts(Decoder):
    """A decoder of one text at a time, whose rows from ``prompt`` on attend part by part.

    Attributes:
        prompt: how many rows are exact.
        rotation: how latents are turned and cut.
        parts_norm, parts_softmax: whether parts have a norm, or a softmax, of their own.
        split_heads: whether each part has its own share of the heads instead of all of them, and
            their scores as they are (grouped latent attention).
    """

    prompt = 0
    rotation: LatentRotation
    parts_norm = True
    parts_softmax = True
    split_heads = False

    def _latent_attention(
        self,
        index: int,
        weights: LatentWeights,
        output: Affine,
        hidden: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:
        latent, epsilon, rows = self.config.latent, self.config.norm_epsilon, len(hidden)
        assert latent is not None
        parts = self.rotation.parts
        axes, gamma = self.rotation.axes[index], weights.key_norm.weight
        shares, scales = self.rotation.shares[index], self.rotation.scales[index]
        q = self._latent_queries(weights, hidden)
        compressed = functional.linear(hidden, weights.key.weight)
        turned = compressed[:, : latent.rank] @ axes
        exact = turned / (turned.square().mean(-1, keepdim=True) + epsilon).sqrt()
        by_parts = [
            part / (part.square().sum(-1, keepdim=True) / (share * latent.rank) + epsilon).sqrt()
            for part, share in zip(turned.chunk(parts, -1), shares, strict=True)
        ]
        is_exact = torch.arange(rows)[:, None] < self.prompt
        keys = torch.where(is_exact, exact, torch.cat(by_parts, -1)) if self.parts_norm else exact
        cos, sin = (turn[:, 0] for turn in batch.turns[0])
        shared = _rotate(compressed[:, latent.rank :], cos, sin)
        values = torch.zeros(rows, self.config.query_heads, latent.value_dim)
        for head in range(self.config.query_heads):
            absorbed = q[:, head, : latent.plain_dim] @ (weights.absorb[head] * gamma) @ axes
            expand = (weights.expand[head] * gamma) @ axes
            positional = _rotate(q[:, head, latent.plain_dim :], cos, sin) @ shared.T

            def attend(scores: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
                masked = scores.masked_fill(~torch.ones(rows, rows).tril().bool(), -torch.inf)
                return (masked * self.config.score_scale).softmax(-1) @ latents

            whole = attend(absorbed @ keys.T + positional, keys) @ expand.T
            queries, slices = absorbed.chunk(parts, -1), keys.chunk(parts, -1)
            ways = list(zip(queries, slices, expand.chunk(parts, -1), scales, strict=True))
            if self.split_heads:
                query, keep, give, _ = ways[head * parts // self.config.query_heads]
                apart = attend(query @ keep.T + positional, keep) @ give.T
            else:
                apart = torch.zeros_like(whole)
                for query, keep, give, scale in ways:
                    apart += attend(scale * (query @ keep.T) + positional, keep) @ give.T
            changed = self.parts_softmax or self.split_heads
            values[:, head] = torch.where(is_exact, whole, apart if changed else whole)
        return functional.linear(values.flatten(1), output.weight)


def _rotate(pairs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = pairs[:, 0::2], pairs[:, 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def naive_logits(
    config: ModelConfig,
    weights: DecoderWeights,
    rotation: LatentRotation,
    tokens: Sequence[int],
    prompt: int,
    **ways: bool,
) -> torch.Tensor:
    """Return the logits [tokens, vocab] of a text.

    Args:
        config, weights: the model.
        rotation: how its latents are turned and cut.
        tokens: the text.
        prompt: how many of them are exact.
        ways: attributes of ``NaiveParts``.
    """
    decoder = NaiveParts(config, weights, KVCache.empty(config, 1, CPU, torch.float32))
    decoder.prompt, decoder.rotation = prompt, rotation
    for name, value in ways.items():
        setattr(decoder, name, value)
    batch = text_batch(tokens, 0)
    with torch.inference_mode():
        prepared = decoder.prepare(replace(batch, write_slots=np.zeros(len(tokens), np.int32)))
        hidden = decoder.run_layers(prepared, decoder.embed(batch), 0, config.layers)
        return decoder.compute_logits(batch, hidden)


def text_batch(tokens: Sequence[int], first: int, *, by_parts: bool = False) -> ForwardBatch:
    """Return the rows of a text from token ``first`` on, in slots of the tokens' numbers."""
    rows = np.arange(first, len(tokens), dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(tokens[first:], np.int32),
        positions=rows,
        write_slots=rows,
        query_indptr=np.array([0, len(rows)], np.int32),
        kv_indptr=np.array([0, len(tokens)], np.int32),
        kv_slots=np.arange(len(tokens), dtype=np.int32),
        logit_rows=np.arange(len(rows), dtype=np.int32),
        attention=(AttentionPlan(by_parts=True),) if by_parts else (),
    )


@dataclass
class _Exchange:
    barrier: Barrier
    given: list[torch.Tensor | None]


@dataclass
class ThreadGroup:
    """Implements ``PartGroup`` for threads of one process; counts what is exchanged."""

    rank: int
    size: int
    exchange: _Exchange
    sums: int = 0
    gathers: int = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return torch.stack(self._exchanged(values)).sum(0)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        self.gathers += 1
        return self._exchanged(values)

    def _exchanged(self, values: torch.Tensor) -> list[torch.Tensor]:
        self.exchange.given[self.rank] = values
        self.exchange.barrier.wait()
        given = [part for part in self.exchange.given if part is not None]
        self.exchange.barrier.wait()
        return given


class Parts:
    """All parts of a model, each in a thread, cut out of one set of weights.

    Attributes:
        parts: by rank.
        groups: of each.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rotation: LatentRotation, slots: int
    ) -> None:
        size = rotation.parts
        exchange = _Exchange(Barrier(size, timeout=60), [None] * size)
        self.groups = [ThreadGroup(rank, size, exchange) for rank in range(size)]
        self.parts = [
            LatentPart(config, cut_weights(config, weights, rotation, group.rank), slots, group)
            for group in self.groups
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the logits of a batch's rows, which are the same in all parts."""
        first, *others = self._all(lambda part: _forward(part, batch))
        assert all(torch.equal(first, other) for other in others)
        return first

    def _all(self, call: Callable[[LatentPart], torch.Tensor]) -> list[torch.Tensor]:
        with ThreadPoolExecutor(len(self.parts)) as threads:
            return list(threads.map(call, self.parts))


@torch.inference_mode()
def _forward(part: LatentPart, batch: ForwardBatch) -> torch.Tensor:
    hidden = part.run_layers(part.prepare(batch), part.embed(batch), 0, part.config.layers)
    return part.compute_logits(batch, hidden)


@dataclass(frozen=True)
class LatentModel:
    """A checkpoint, its weights, and texts: the first ones calibrate, the last one tests."""

    checkpoint: Checkpoint
    weights: DecoderWeights
    texts: tuple[Int32Array, ...]

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def tested(self) -> list[int]:
        tokens: list[int] = self.texts[-1][:160].tolist()
        return tokens

    def rotation(self, parts: int = 2) -> LatentRotation:
        return calibrate(self.config, self.weights, self.texts[:-1], parts)

    def divergence(
        self, rotation: LatentRotation, prompt: int = 0, scored: int = 80, **ways: bool
    ) -> float:
        """Return the KL divergence from the model of the text's rows from ``scored`` on.

        Args:
            rotation: how latents are turned and cut.
            prompt: how many rows are exact.
            scored: the first row that counts.
            ways: see ``naive_logits``.
        """
        config, weights, text = self.config, self.weights, self.tested
        exact = naive_logits(config, weights, rotation, text, len(text))
        found = naive_logits(config, weights, rotation, text, prompt, **ways)
        exact, found = (each[scored:].double().log_softmax(-1) for each in (exact, found))
        return float((exact.exp() * (exact - found)).sum(-1).mean())


def load_latent_model(folder: Path, variant: str = "deepseek2", **fields: object) -> LatentModel:
    """Write a tiny checkpoint whose latents reach all of their 128 directions, and load it."""
    checkpoint = open_checkpoint(write_tiny(variant, folder, hidden_size=192, **fields))
    texts = calibration_texts(checkpoint.tokenizer.encode, context=256)
    return LatentModel(checkpoint, load_weights(checkpoint, CPU, torch.float32), texts)
