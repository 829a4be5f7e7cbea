"""What a model's latents and queries are found to be, and what follows from them."""

import math

import torch
from naive_latents import LatentModel

from midfill.runners.torch.latent_parts.calibration import (
    calibrate,
    calibration_texts,
    observe_texts,
)
from midfill.runners.torch.latent_parts.rotation import LatentRotation
from midfill.runners.torch.weights import LatentWeights


def test_latents_and_queries_are_those_of_the_first_layer(model: LatentModel) -> None:
    """The first layer's inputs are embeddings, so they can be computed by hand."""
    text = model.texts[0][:40]
    ((latents, queries),) = observe_texts(model.config, model.weights, [text])
    layer, latent = model.weights.layers[0], model.config.latent
    attention = layer.qkv
    assert isinstance(attention, LatentWeights)
    assert latent is not None
    hidden = model.weights.embed[text.tolist()]
    hidden = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    hidden = hidden * layer.attn_norm.weight
    found = hidden @ attention.key.weight[: latent.rank].T
    found = found / (found.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(latents[0], found, rtol=1e-4, atol=1e-4)
    asked = (hidden @ attention.query.weight.T).view(len(text), 4, -1)[-32:, :, : latent.plain_dim]
    absorbed = torch.einsum("nhp,hpc->nhc", asked, attention.absorb * attention.key_norm.weight)
    torch.testing.assert_close(queries[0], absorbed, rtol=1e-4, atol=1e-3)


def test_the_first_part_has_most_of_the_energy(rotation: LatentRotation) -> None:
    assert (rotation.shares[:, 0] > 0.9).all()
    torch.testing.assert_close(rotation.shares.sum(1), torch.ones(3))


def test_less_text_than_numbers_in_a_latent(model: LatentModel, rotation: LatentRotation) -> None:
    """The axes are complete nevertheless; more text does better."""
    found = calibrate(model.config, model.weights, [model.texts[0][:20]], 2)
    for axes in found.axes:
        torch.testing.assert_close(axes.T @ axes, torch.eye(128), rtol=0, atol=1e-5)
    assert found.shares.isfinite().all()
    assert found.scales.isfinite().all()
    assert model.divergence(rotation, 80) < model.divergence(found, 80) < math.inf


def test_texts_are_source_code_that_fits_the_context() -> None:
    texts = calibration_texts(lambda text: [ord(letter) for letter in text], 100)
    assert [len(text) for text in texts] == [100] * 4
    longer = calibration_texts(lambda text: list(text.encode()), 10**6)
    assert [len(text) for text in longer] == [512] * 4
    assert b"command-line" in bytes(longer[0].tolist())
