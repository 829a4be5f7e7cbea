"""Turning latents changes nothing; which of them go together decides what cutting them costs."""

from dataclasses import replace

import pytest
import torch
from naive_latents import (
    CPU,
    LatentModel,
    energy_scales,
    hadamard_axes,
    naive_logits,
    planted,
    random_axes,
    text_batch,
)

from midfill.runners.torch.decoder import Decoder, KVCache
from midfill.runners.torch.latent_parts.calibration import Observed, observe_texts
from midfill.runners.torch.latent_parts.rotation import (
    LEAST_SHARE,
    MOST_SCALE,
    LatentRotation,
    energy_shares,
    fitted_scales,
    fold_norm,
    principal_axes,
    rotate,
)
from midfill.runners.torch.weights import Affine, DecoderWeights, LatentWeights

RANK = 128


def turned(weights: DecoderWeights, axes: torch.Tensor) -> DecoderWeights:
    """The whole model, reparameterised and not cut."""
    layers = []
    for layer, turn in zip(weights.layers, axes, strict=True):
        assert isinstance(layer.qkv, LatentWeights)
        layers.append(replace(layer, qkv=rotate(fold_norm(layer.qkv), turn)))
    return replace(weights, layers=tuple(layers))


def logits(model: LatentModel, weights: DecoderWeights) -> torch.Tensor:
    cache = KVCache.empty(model.config, len(model.tested), CPU, torch.float32)
    decoder, batch = Decoder(model.config, weights, cache), text_batch(model.tested, 0)
    with torch.inference_mode():
        hidden = decoder.embed(batch)
        hidden = decoder.run_layers(decoder.prepare(batch), hidden, 0, model.config.layers)
        return decoder.compute_logits(batch, hidden)


def every_layer(model: LatentModel, axes: torch.Tensor) -> torch.Tensor:
    return axes.expand(model.config.layers, -1, -1)


@pytest.fixture(scope="module")
def observed(model: LatentModel) -> Observed:
    return observe_texts(model.config, model.weights, model.texts[:-1])


def with_axes(observed: Observed, axes: torch.Tensor, *, fitted: bool = True) -> LatentRotation:
    """Other axes, with shares and scales as ``calibrate`` finds them, or with the paper's."""
    shares = energy_shares(torch.cat([keys @ axes for keys, _ in observed], 1), 2)
    if not fitted:
        return LatentRotation(axes, shares, energy_scales(shares))
    scales = [
        fitted_scales(torch.einsum("lnhc,lcd->lnhd", queries, axes), keys @ axes, 2)
        for keys, queries in observed
    ]
    return LatentRotation(axes, shares, torch.stack(scales).mean(0))


class TestTurning:
    @pytest.mark.parametrize("axes", ["pca", "hadamard", "random"])
    def test_a_turn_changes_nothing(
        self, model: LatentModel, rotation: LatentRotation, axes: str
    ) -> None:
        chosen = {
            "pca": rotation.axes,
            "hadamard": every_layer(model, hadamard_axes(RANK)),
            "random": every_layer(model, random_axes(RANK)),
        }[axes]
        expected = logits(model, model.weights)
        torch.testing.assert_close(
            logits(model, turned(model.weights, chosen)), expected, rtol=0, atol=1e-4
        )

    def test_the_absorbed_form_is_the_one_with_keys_and_values(self, model: LatentModel) -> None:
        """In one layer, against k = [W_UK c, shared] and v = W_UV c."""
        attention, latent = model.weights.layers[0].qkv, model.config.latent
        assert isinstance(attention, LatentWeights)
        assert latent is not None
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(9, latent.rank, generator=generator)
        plain = torch.randn(len(attention.absorb), latent.plain_dim, generator=generator)
        turn = random_axes(RANK)
        both = rotate(fold_norm(attention), turn)
        normed = latents * attention.key_norm.weight
        keys = torch.einsum("nc,hpc->hnp", normed, attention.absorb)
        values = torch.einsum("nc,hvc->hnv", normed, attention.expand)
        scores = torch.einsum("hp,hnp->hn", plain, keys)
        absorbed = torch.einsum("hp,hpc->hc", plain, both.absorb)
        torch.testing.assert_close(absorbed @ (latents @ turn).T, scores, rtol=1e-4, atol=1e-3)
        sums = torch.einsum("hn,nc->hc", scores.softmax(-1), latents @ turn)
        found = torch.einsum("hc,hvc->hv", sums, both.expand)
        expected = torch.einsum("hn,hnv->hv", scores.softmax(-1), values)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)

    def test_the_norms_gamma_has_to_be_folded_first(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        layers = tuple(
            replace(layer, qkv=rotate(layer.qkv, turn))  # type: ignore[arg-type]
            for layer, turn in zip(model.weights.layers, rotation.axes, strict=True)
        )
        wrong = logits(model, replace(model.weights, layers=layers))
        assert (wrong - logits(model, model.weights)).abs().max() > 0.1


class TestAxes:
    def test_the_first_axes_have_the_most_energy(self) -> None:
        energies = torch.tensor([4.0, 3.0, 2.0, 1.0])
        turn = random_axes(4)
        latents = (
            torch.randn(1, 400, 4, generator=torch.Generator().manual_seed(1)) * energies
        ) @ (turn.T)
        axes = principal_axes(latents)
        found = (latents @ axes).square().mean((0, 1))
        assert found.tolist() == sorted(found.tolist(), reverse=True)
        torch.testing.assert_close(axes[0].T @ axes[0], torch.eye(4), rtol=0, atol=1e-5)
        shares = energy_shares(latents @ axes, 2)
        torch.testing.assert_close(shares, (found.view(1, 2, 2).sum(-1) / found.sum()))

    def test_fewer_latents_than_numbers_in_one(self) -> None:
        latents = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2))
        axes = principal_axes(latents)
        torch.testing.assert_close(
            axes.mT @ axes, torch.eye(16).expand(2, -1, -1), rtol=0, atol=1e-5
        )
        shares = energy_shares(latents @ axes, 4)
        torch.testing.assert_close(shares[:, 0], torch.ones(2))
        assert (shares > 0).all()


class TestScales:
    def test_they_are_the_least_squares(self) -> None:
        """Against NumPy's, of centred scores, for one layer."""
        generator = torch.Generator().manual_seed(3)
        queries = torch.randn(1, 5, 2, 8, generator=generator)
        keys = torch.randn(1, 9, 8, generator=generator) * torch.tensor([3.0] * 4 + [1.0] * 4)
        queries[..., 4:] += queries[..., :4]
        columns: list[list[torch.Tensor]] = [[], []]
        for row in range(5):
            seen = keys[0, : 5 + row]
            for head in range(2):
                for part in range(2):
                    own = slice(4 * part, 4 * part + 4)
                    scores = seen[:, own] @ queries[0, row, head, own]
                    columns[part].append(scores - scores.mean())
        first, second = (torch.cat(column).double() for column in columns)
        expected = [float((first + second) @ part / (part @ part)) for part in (first, second)]
        assert fitted_scales(queries, keys, 2)[0].tolist() == pytest.approx(expected, rel=1e-5)

    def test_a_part_without_energy_is_left_as_it_is(self) -> None:
        queries = torch.ones(1, 4, 2, 8)
        keys = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(4))
        keys[..., 4:] = 0
        assert fitted_scales(queries, keys, 2)[0].tolist() == pytest.approx([1.0, 1.0])
        assert energy_shares(keys, 2)[0, 1] == pytest.approx(LEAST_SHARE)

    def test_they_are_bounded(self) -> None:
        """A part whose scores go against the whole."""
        keys = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(5))
        keys[..., 4:] = -0.9 * keys[..., :4]
        scales = fitted_scales(torch.ones(1, 4, 2, 8), keys, 2)[0]
        assert scales.min() == pytest.approx(1 / MOST_SCALE)
        assert scales.max() <= MOST_SCALE

    def test_fitted_ones_lose_less_than_the_papers(
        self, model: LatentModel, rotation: LatentRotation, observed: Observed
    ) -> None:
        papers = with_axes(observed, rotation.axes, fitted=False)
        assert model.divergence(rotation, 80) < 0.7 * model.divergence(papers, 80)


class TestCuts:
    """Of one planted model with random weights; what a trained one loses, it doesn't tell."""

    def test_what_each_way_of_cutting_costs(
        self, model: LatentModel, rotation: LatentRotation, observed: Observed
    ) -> None:
        apart = model.divergence(rotation, 80)
        everywhere = model.divergence(rotation)
        unaligned = model.divergence(
            with_axes(observed, torch.stack([random_axes(RANK, 9 + n) for n in range(3)]))
        )
        grouped = model.divergence(rotation, split_heads=True)
        assert model.divergence(rotation, len(model.tested)) == 0
        assert 0 < apart < 0.8 * everywhere
        assert everywhere < 0.2 * unaligned
        assert everywhere < 0.2 * grouped

    def test_the_norm_costs_less_than_the_softmax_and_both_cost_most(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        norm = model.divergence(rotation, parts_softmax=False)
        softmax = model.divergence(rotation, parts_norm=False)
        assert 0 < norm < softmax < model.divergence(rotation)

    def test_hadamards_axes_suit_the_norm(self, model: LatentModel) -> None:
        """Where a few of the numbers are loud, as they are in trained models."""
        layers = []
        for layer in model.weights.layers:
            assert isinstance(layer.qkv, LatentWeights)
            key = layer.qkv.key.weight.clone()
            key[: RANK // 16] *= 6
            layers.append(replace(layer, qkv=replace(layer.qkv, key=Affine(key))))
        loud = replace(model, weights=replace(model.weights, layers=tuple(layers)))
        observed = observe_texts(loud.config, loud.weights, loud.texts[:-1])
        lost = [
            loud.divergence(with_axes(observed, every_layer(loud, axes)), parts_softmax=False)
            for axes in (torch.eye(RANK), hadamard_axes(RANK))
        ]
        assert 0 < lost[1] < 0.8 * lost[0]

    def test_latents_within_the_first_part_are_exact(self, model: LatentModel) -> None:
        within = replace(model, weights=planted(model.weights, RANK, reached=RANK // 2))
        given = (within.config, within.weights, within.rotation(), within.tested)
        exact, cut = naive_logits(*given, prompt=160), naive_logits(*given, prompt=0)
        torch.testing.assert_close(cut, exact, rtol=0, atol=1e-3)
