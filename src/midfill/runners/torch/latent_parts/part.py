"""LatentPart: one part of latent attention, beside all else of a model.

Each part has rank / parts numbers of every token's latent, and the rotated part of its key, which
all heads share. Rows whose request asks for it (``AttentionPlan.by_parts``) attend to each part by
itself, with a norm and a softmax of the part's own: a part is then latent attention of a smaller
rank, and the model's is the sum of what the parts put out. It reads no more than the part has.

All other rows are computed exactly, the heads divided among the parts: the latents of the keys that
they see are gathered for the time of a layer. Their own are normed as a whole, so what a part keeps
of them is a slice of the exact latents. The parts sum what their heads put out; a head's is 0 in
the other parts, so that the sum has the bits of one decoder.

What isn't attention, every part computes by itself, to the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from midfill.arrays import Int32Array
from midfill.models.config import LatentAttention, ModelConfig
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache, PreparedBatch, in_key_order, latents_of
from midfill.runners.torch.dense_attention import AttentionMetadata, attend, prepare_metadata
from midfill.runners.torch.latent_parts.group import PartGroup
from midfill.runners.torch.latent_parts.rotation import LatentRotation, fold_norm, rotate
from midfill.runners.torch.weights import Affine, DecoderWeights, LatentWeights


@dataclass(frozen=True)
class LatentPartWeights(LatentWeights):
    """The latent attention of one layer, as a part of it has it.

    What is inherited is for exact rows: ``absorb`` and ``expand`` are those of the part's share of
    the heads, over the whole latent, ``key`` is whole, and ``key_norm`` without a gamma.

    Attributes:
        part_key: the part's rows of W_DKV, and the rows of the rotated part.
        part_norm: of the part's numbers: sqrt(rho parts).
        part_epsilon: the norm's, times rho parts.
        part_absorb: W_UK of all heads, times mu: [query_heads, plain_dim, rank / parts].
        part_expand: W_UV of all heads: [query_heads, value_dim, rank / parts].
    """

    part_key: Affine
    part_norm: torch.Tensor
    part_epsilon: float
    part_absorb: torch.Tensor
    part_expand: torch.Tensor


@dataclass(frozen=True)
class PreparedParts(PreparedBatch):
    """What the layers need of a batch.

    Attributes:
        parted_rows, exact_rows: [n] int64, rows of the batch that attend part by part, and others.
        exact_slots: [m] int64, of the keys that exact rows see.
        exact_attention: of exact rows, over the keys in ``exact_slots``. ``attention`` is that of
            the others.
    """

    parted_rows: torch.Tensor
    exact_rows: torch.Tensor
    exact_slots: torch.Tensor
    exact_attention: AttentionMetadata


def part_config(config: ModelConfig, parts: int) -> ModelConfig:
    """Return a model's shape as a part's KV cache has it: its latents are shorter."""
    latent = config.latent
    assert latent is not None
    shorter = replace(latent, rank=latent.rank // parts)
    return replace(
        config, latent=shorter, head_dim=shorter.key_dim, attention_scale=config.score_scale
    )


def part_weights(
    weights: LatentWeights,
    axes: torch.Tensor,
    shares: torch.Tensor,
    scales: torch.Tensor,
    rank: int,
    epsilon: float,
) -> LatentPartWeights:
    """Return what a part has of a layer's latent attention.

    Args:
        weights: of the layer, as loaded.
        axes, shares, scales: of the layer, see ``LatentRotation``.
        rank: the part's number.
        epsilon: the norm's.
    """
    turned = rotate(fold_norm(weights), axes)
    parts, width = len(shares), len(axes) // len(shares)
    own = slice(rank * width, (rank + 1) * width)
    heads = head_share(len(turned.absorb), rank, parts)
    energy = float(shares[rank]) * parts
    key = turned.key.weight
    inherited = {field.name: getattr(turned, field.name) for field in fields(LatentWeights)}
    inherited["absorb"] = turned.absorb[heads].clone()
    inherited["expand"] = turned.expand[heads].clone()
    return LatentPartWeights(
        **inherited,
        part_key=Affine(torch.cat((key[own], key[len(axes) :]))),
        part_norm=torch.full((width,), energy**0.5, dtype=key.dtype, device=key.device),
        part_epsilon=epsilon * energy,
        part_absorb=(turned.absorb[..., own] * float(scales[rank])).contiguous(),
        part_expand=turned.expand[..., own].contiguous(),
    )


def cut_weights(
    config: ModelConfig, weights: DecoderWeights, rotation: LatentRotation, rank: int
) -> DecoderWeights:
    """Return a decoder's weights with what a part has of its latent attention.

    Args:
        config: of the model.
        weights: as loaded.
        rotation: how its latents are turned.
        rank: the part's number.
    """
    layers = list(weights.layers)
    for number, layer in enumerate(layers):
        assert isinstance(layer.qkv, LatentWeights)
        cut = part_weights(
            layer.qkv, rotation.axes[number], rotation.shares[number], rotation.scales[number],
            rank, config.norm_epsilon,
        )  # fmt: skip
        layers[number] = replace(layer, qkv=cut)
    return replace(weights, layers=tuple(layers))


def head_share(heads: int, rank: int, parts: int) -> slice:
    """Return which heads of exact rows a part computes."""
    return slice(heads * rank // parts, heads * (rank + 1) // parts)


class LatentPart(Decoder):
    """A decoder that has one part of the latents; all parts run the same batches.

    Args:
        config: the whole model's.
        weights: from ``cut_weights``.
        slots: how many tokens' parts to make room for.
        group: of the parts.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, slots: int, group: PartGroup
    ) -> None:
        embed, shape = weights.embed, part_config(config, group.size)
        super().__init__(shape, weights, KVCache.empty(shape, slots, embed.device, embed.dtype))
        assert config.latent is not None
        self._whole: LatentAttention = config.latent
        self._group = group

    def prepare(self, batch: ForwardBatch, first: int = 0) -> PreparedParts:
        """See ``Decoder.prepare``.

        Raises:
            ValueError: a request's plan says more than whether its rows attend part by part.
        """
        # Rows without requests: what they attend to is said below.
        none = np.zeros(1, np.int32)
        rows = replace(
            batch, query_indptr=none, kv_indptr=none, kv_slots=none[:0], attention=(),
            visible_slots=batch.write_slots,
        )  # fmt: skip
        whole = super().prepare(rows, first)
        parted = parted_requests(batch)
        exact = [request for request in range(batch.requests) if request not in set(parted)]
        by_parts, exactly = _requests_of(batch, parted), _requests_of(batch, exact)
        seen = exactly.kv_slots
        gathered = replace(exactly, kv_slots=np.arange(len(seen), dtype=np.int32))
        inherited: dict[str, Any] = {
            field.name: getattr(whole, field.name) for field in fields(PreparedBatch)
        }
        inherited["attention"] = prepare_metadata(by_parts, {None}, self.device)
        return PreparedParts(
            **inherited,
            parted_rows=self._indices(_rows_of(batch, parted)),
            exact_rows=self._indices(_rows_of(batch, exact)),
            exact_slots=self._indices(seen),
            exact_attention=prepare_metadata(gathered, {None}, self.device),
        )

    def _latent_attention(
        self,
        index: int,
        weights: LatentWeights,
        output: Affine,
        hidden: torch.Tensor,
        batch: PreparedBatch,
    ) -> torch.Tensor:
        """Compute attention, with the other parts; see above."""
        assert isinstance(weights, LatentPartWeights)
        assert isinstance(batch, PreparedParts)
        turns = batch.turns[self.config.is_local(index)]
        queries = self._latent_queries(weights, hidden)
        values = hidden.new_zeros(len(hidden), self.config.query_heads, self._whole.value_dim)
        if len(batch.exact_rows):
            rows = batch.exact_rows
            heads = head_share(self.config.query_heads, self._group.rank, self._group.size)
            values[rows, heads] = self._attend_exactly(
                index, weights, hidden[rows], queries[rows, heads],
                (turns[0][rows], turns[1][rows]), batch,
            )  # fmt: skip
        if len(batch.parted_rows):
            rows = batch.parted_rows
            values[rows] = self._attend_part(
                index, weights, hidden[rows], queries[rows],
                (turns[0][rows], turns[1][rows]), batch,
            )  # fmt: skip
        return _linear(self._group.sum(values).flatten(1), output)

    def _attend_part(
        self,
        index: int,
        weights: LatentPartWeights,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        batch: PreparedParts,
    ) -> torch.Tensor:
        """Return what the part adds to its rows' heads: [rows, query_heads, value_dim].

        Args:
            index: the layer.
            weights: its attention.
            hidden: [rows, hidden], normed.
            queries: [rows, query_heads, plain_dim + rotary_dim].
            turns: of the rows.
            batch: from ``prepare``.
        """
        latent = self.config.latent
        assert latent is not None
        compressed = _linear(hidden, weights.part_key)
        kept, shared = torch.split(compressed, [latent.rank, latent.rotary_dim], dim=-1)
        norm = weights.part_norm
        kept = functional.rms_norm(kept, norm.shape, norm, weights.part_epsilon)
        plain, turning = torch.split(queries, [latent.plain_dim, latent.rotary_dim], dim=-1)
        absorbed = torch.einsum("rhp,hpc->rhc", plain, weights.part_absorb)
        keys = self.kv_cache.keys[index]
        own = in_key_order(kept[:, None], shared[:, None], turns)
        keys[batch.write_slots[batch.parted_rows]] = own
        q = in_key_order(absorbed, turning, turns)
        attended = attend(q, keys, keys, batch.attention, None, self.config.score_scale)
        return torch.einsum("rhc,hvc->rhv", latents_of(attended, latent), weights.part_expand)

    def _attend_exactly(
        self,
        index: int,
        weights: LatentPartWeights,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        batch: PreparedParts,
    ) -> torch.Tensor:
        """Return what the part's share of the heads puts out: [rows, heads, value_dim].

        Args:
            index, weights, hidden, turns, batch: see ``_attend_part``.
            queries: [rows, heads, plain_dim + rotary_dim] of the share.
        """
        whole, latent = self._whole, self.config.latent
        assert latent is not None
        compressed = _linear(hidden, weights.key)[:, None]
        kept, shared = torch.split(compressed, [whole.rank, whole.rotary_dim], dim=-1)
        kept = self._norm(kept, weights.key_norm)
        own = kept[..., self._group.rank * latent.rank :][..., : latent.rank]
        cache = self.kv_cache.keys[index]
        cache[batch.write_slots[batch.exact_rows]] = in_key_order(own, shared, turns)
        keys = self._gather(cache[batch.exact_slots])
        plain, turning = torch.split(queries, [whole.plain_dim, whole.rotary_dim], dim=-1)
        absorbed = torch.einsum("rhp,hpc->rhc", plain, weights.absorb)
        q = in_key_order(absorbed, turning, turns)
        scale = self.config.score_scale
        attended = attend(q, keys, keys, batch.exact_attention, None, scale)
        return torch.einsum("rhc,hvc->rhv", latents_of(attended, whole), weights.expand)

    def _gather(self, keys: torch.Tensor) -> torch.Tensor:
        """Return whole keys [n, 1, rank + rotary_dim] for the part's keys."""
        latent = self.config.latent
        assert latent is not None
        halves = [latent.rank // 2, latent.rotary_dim // 2] * 2
        _, turned, _, turned_too = torch.split(keys, halves, dim=-1)
        latents = torch.cat(self._group.gather(latents_of(keys, latent)), dim=-1)
        first, second = latents.chunk(2, dim=-1)
        return torch.cat((first, turned, second, turned_too), dim=-1)


def parted_requests(batch: ForwardBatch) -> list[int]:
    """Return the requests of a batch whose rows attend part by part.

    Raises:
        ValueError: a request's plan says more than that.
    """
    for number, plan in batch.plans():
        if plan.cells is not None or not plan.is_dense:
            raise ValueError(f"request {number}: latents in parts have no other keys or choices")
    return [number for number, plan in batch.plans() if plan.by_parts]


def _rows_of(batch: ForwardBatch, requests: Sequence[int]) -> Int32Array:
    """Return the rows of some requests: [n] int32."""
    return _spans(batch.query_indptr, requests)


def _requests_of(batch: ForwardBatch, requests: Sequence[int]) -> ForwardBatch:
    """Return a batch of some requests alone, without plans, for its attention."""
    rows = _spans(batch.query_indptr, requests)
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        write_slots=batch.write_slots[rows],
        query_indptr=_lengths(batch.query_indptr, requests),
        kv_indptr=_lengths(batch.kv_indptr, requests),
        kv_slots=batch.kv_slots[_spans(batch.kv_indptr, requests)],
        logit_rows=batch.logit_rows[:0],
        observed_rows=batch.observed_rows[:0],
        visible_slots=batch.slots_seen()[rows],
        attention=(),
    )


def _spans(indptr: Int32Array, requests: Sequence[int]) -> Int32Array:
    spans = [np.arange(indptr[one], indptr[one + 1], dtype=np.int32) for one in requests]
    return np.concatenate(spans) if spans else np.zeros(0, np.int32)


def _lengths(indptr: Int32Array, requests: Sequence[int]) -> Int32Array:
    lengths = np.diff(indptr)[list(requests)]
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _linear(values: torch.Tensor, affine: Affine) -> torch.Tensor:
    return functional.linear(values, affine.weight, affine.bias)
