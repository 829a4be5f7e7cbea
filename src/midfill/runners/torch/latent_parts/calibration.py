"""calibrate: find how a model's latents are turned and cut, from what it makes of some text.

The text is source code of Python's standard library, 512 tokens of each of four modules, so that
there are more rows than a latent has numbers. It runs through the unchanged model, whose keys and
queries say all: U is the principal axes of each layer's latents, rho the energy along them, and mu
is fitted to the scores of the last rows of each text.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from midfill.arrays import Int32Array
from midfill.models.config import ModelConfig
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache, latents_of
from midfill.runners.torch.latent_parts.rotation import (
    LatentRotation,
    energy_shares,
    fitted_scales,
    fold_norm,
    principal_axes,
)
from midfill.runners.torch.weights import DecoderWeights, LatentWeights

_MODULES = ("argparse", "difflib", "tarfile", "zipfile")
_TEXT_TOKENS = 512
_QUERIES = 32
"""Of each text, the last ones: their scores are fitted."""

Observed = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each text, the normed latents [layers, n, rank] and the absorbed queries of its last rows
[layers, m, query_heads, rank]; float32 on the CPU."""


def calibration_texts(
    encode: Callable[[str], Sequence[int]], context: int
) -> tuple[Int32Array, ...]:
    """Return the tokens of some source code: several [n] int32.

    Args:
        encode: returns a text's tokens.
        context: how many of them the model sees at most.
    """
    texts = []
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text("utf-8")[: 8 * _TEXT_TOKENS]
        texts.append(np.array(encode(source)[: min(_TEXT_TOKENS, context)], np.int32))
    return tuple(texts)


def calibrate(
    config: ModelConfig, weights: DecoderWeights, texts: Sequence[Int32Array], parts: int
) -> LatentRotation:
    """Run texts through a model with latent attention; return how its latents are cut.

    Args:
        config: of the model.
        weights: as loaded.
        texts: the tokens of each.
        parts: into how many.
    """
    found = observe_texts(config, weights, texts)
    latents = torch.cat([keys for keys, _ in found], dim=1)
    axes = principal_axes(latents)
    scales = [
        fitted_scales(torch.einsum("lnhc,lcd->lnhd", queries, axes), keys @ axes, parts)
        for keys, queries in found
    ]
    return LatentRotation(axes, energy_shares(latents @ axes, parts), torch.stack(scales).mean(0))


def observe_texts(
    config: ModelConfig, weights: DecoderWeights, texts: Sequence[Int32Array]
) -> Observed:
    """Return the latents and queries that a model has for each text.

    Args:
        config, weights: of the model.
        texts: the tokens of each.
    """
    # Keys then hold latents without the norm's gamma, and queries are absorbed accordingly.
    folded = tuple(
        replace(layer, qkv=fold_norm(layer.qkv)) if isinstance(layer.qkv, LatentWeights) else layer
        for layer in weights.layers
    )
    return [_observe(config, replace(weights, layers=folded), text) for text in texts]


@torch.inference_mode()
def _observe(
    config: ModelConfig, weights: DecoderWeights, text: Int32Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a text has in ``Observed``."""
    rows = np.arange(len(text), dtype=np.int32)
    ends = np.array([0, len(text)], np.int32)
    embed = weights.embed
    cache = KVCache.empty(config, len(text), embed.device, embed.dtype)
    decoder = Decoder(config, weights, cache)
    batch = ForwardBatch(
        token_ids=text, positions=rows, write_slots=rows, query_indptr=ends, kv_indptr=ends,
        kv_slots=rows, logit_rows=rows[:0], observed_rows=rows[-_QUERIES:],
    )  # fmt: skip
    decoder.run_layers(decoder.prepare(batch), decoder.embed(batch), 0, config.layers)
    latent = config.latent
    assert latent is not None
    queries = torch.stack(decoder.observed)
    keys, queries = latents_of(cache.keys[:, :, 0], latent), latents_of(queries, latent)
    return keys.float().cpu(), queries.float().cpu()
