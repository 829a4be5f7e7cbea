"""Parts of latent attention, each in a thread, against the formulas and against one decoder."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from naive_latents import (
    CPU,
    LatentModel,
    Parts,
    load_latent_model,
    naive_logits,
    text_batch,
)

from midfill.runners.forward.attention import AttentionPlan, KeyPart
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache
from midfill.runners.torch.latent_parts.part import LatentPartWeights, head_share, parted_requests
from midfill.runners.torch.latent_parts.rotation import LatentRotation, fold_norm, rotate
from midfill.runners.torch.weights import LatentWeights

SLOTS, PROMPT = 80, 25
TEXT = np.random.default_rng(1).integers(4, 320, 40).tolist()


def whole(model: LatentModel, rotation: LatentRotation | None = None) -> Decoder:
    """One decoder of the whole model, with its latents turned or as they are."""
    layers = list(model.weights.layers)
    for number, layer in enumerate(layers if rotation is not None else ()):
        assert isinstance(layer.qkv, LatentWeights)
        assert rotation is not None
        turned = rotate(fold_norm(layer.qkv), rotation.axes[number])
        layers[number] = replace(layer, qkv=turned)
    weights = replace(model.weights, layers=tuple(layers))
    return Decoder(model.config, weights, KVCache.empty(model.config, SLOTS, CPU, torch.float32))


@torch.inference_mode()
def forward(decoder: Decoder, batch: ForwardBatch) -> torch.Tensor:
    hidden = decoder.embed(batch)
    hidden = decoder.run_layers(decoder.prepare(batch), hidden, 0, decoder.config.layers)
    return decoder.compute_logits(batch, hidden)


def parts_of(model: LatentModel, rotation: LatentRotation) -> Parts:
    return Parts(model.config, model.weights, rotation, SLOTS)


def join(one: ForwardBatch, other: ForwardBatch, moved: int) -> ForwardBatch:
    """Two requests in one batch, the other's slots moved away from the one's."""
    plans = [request.attention or (None,) for request in (one, other)]
    rows = {
        name: np.concatenate((getattr(one, name), getattr(other, name) + offset))
        for name, offset in [
            ("token_ids", 0), ("positions", 0), ("write_slots", moved), ("kv_slots", moved),
            ("logit_rows", one.rows),
        ]
    }  # fmt: skip
    ends = {
        name: np.concatenate(
            (getattr(one, name), getattr(other, name)[1:] + getattr(one, name)[-1])
        )
        for name in ("query_indptr", "kv_indptr")
    }
    return ForwardBatch(**rows, **ends, attention=(*plans[0], *plans[1]))


def test_one_part_is_the_model(model: LatentModel) -> None:
    rotation = model.rotation(1)
    part = parts_of(model, rotation)
    found = part.forward(text_batch(TEXT, 0, by_parts=True))
    torch.testing.assert_close(found, forward(whole(model), text_batch(TEXT, 0)), rtol=0, atol=5e-5)


class TestExactRows:
    def test_they_have_the_bits_of_one_decoder(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        """The heads are divided, and what each puts out is in one part alone."""
        parts = parts_of(model, rotation)
        found = [parts.forward(text_batch(TEXT[:end], start)) for start, end in ((0, 17), (17, 40))]
        one = whole(model, rotation)
        expected = [
            forward(one, text_batch(TEXT[:end], start)) for start, end in ((0, 17), (17, 40))
        ]
        assert torch.equal(torch.cat(found), torch.cat(expected))

    def test_parts_keep_slices_of_the_exact_latents(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        parts, one = parts_of(model, rotation), whole(model, rotation)
        parts.forward(text_batch(TEXT, 0))
        forward(one, text_batch(TEXT, 0))
        first, second = np.split(np.arange(one.config.head_dim), 2)
        kept = [part.kv_cache.keys.chunk(2, -1) for part in parts.parts]
        slices = torch.cat([half[..., :32] for halves in kept for half in halves], -1)
        latents = one.kv_cache.keys[..., [*first[:64], *second[:64]]]
        assert torch.equal(slices, latents)
        for halves in kept:  # and all of them the whole rotated part
            turned = torch.cat([half[..., 32:] for half in halves], -1)
            assert torch.equal(turned, one.kv_cache.keys[..., [*first[64:], *second[64:]]])


class TestParted:
    @pytest.mark.parametrize("parts", [2, 4])
    def test_answers_follow_the_formulas(self, model: LatentModel, parts: int) -> None:
        """Token by token after an exact prompt, and all tokens at once, as after a preemption."""
        rotation = model.rotation(parts)
        expected = naive_logits(model.config, model.weights, rotation, TEXT, PROMPT)
        cut = parts_of(model, rotation)
        cut.forward(text_batch(TEXT[:PROMPT], 0))
        rows = [
            cut.forward(text_batch(TEXT[: row + 1], row, by_parts=True))
            for row in range(PROMPT, len(TEXT))
        ]
        torch.testing.assert_close(torch.cat(rows), expected[PROMPT:], rtol=0, atol=5e-5)
        again = cut.forward(text_batch(TEXT, PROMPT, by_parts=True))
        torch.testing.assert_close(again, expected[PROMPT:], rtol=0, atol=5e-5)

    @pytest.mark.parametrize(
        ("variant", "fields"),
        [
            ("deepseekv3", {"q_lora_rank": 64}),
            ("deepseek2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
        ],
    )
    def test_of_other_models(self, tmp_path: Path, variant: str, fields: dict[str, object]) -> None:
        """With latents of queries and groups of experts; with a number of heads that is odd."""
        loaded = load_latent_model(tmp_path, variant, **fields)
        rotation = loaded.rotation()
        cut = parts_of(loaded, rotation)
        expected = naive_logits(loaded.config, loaded.weights, rotation, TEXT, PROMPT)
        prompt = cut.forward(text_batch(TEXT[:PROMPT], 0))
        answer = cut.forward(text_batch(TEXT, PROMPT, by_parts=True))
        torch.testing.assert_close(torch.cat((prompt, answer)), expected, rtol=0, atol=1e-4)

    def test_after_a_prompt_of_one_token(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        cut = parts_of(model, rotation)
        expected = naive_logits(model.config, model.weights, rotation, TEXT[:6], 1)
        cut.forward(text_batch(TEXT[:1], 0))
        found = cut.forward(text_batch(TEXT[:6], 1, by_parts=True))
        torch.testing.assert_close(found, expected[1:], rtol=0, atol=5e-5)

    def test_answers_and_prompts_in_one_batch(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        cut = parts_of(model, rotation)
        answer, other = text_batch(TEXT[:26], 25, by_parts=True), text_batch(TEXT[::-1][:20], 0)
        cut.forward(text_batch(TEXT[:25], 0))
        expected = torch.cat((cut.forward(answer), cut.forward(other)))
        cut.forward(text_batch(TEXT[:25], 0))
        found = cut.forward(join(answer, other, 40))
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)

    def test_the_parts_meet_once_per_layer(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        cut = parts_of(model, rotation)
        cut.forward(text_batch(TEXT[:PROMPT], 0))
        assert [(one.sums, one.gathers) for one in cut.groups] == [(3, 3), (3, 3)]
        for row in range(PROMPT, PROMPT + 4):
            cut.forward(text_batch(TEXT[: row + 1], row, by_parts=True))
        assert [(one.sums, one.gathers) for one in cut.groups] == [(15, 3), (15, 3)]


class TestMemory:
    @pytest.mark.parametrize("parts", [2, 4])
    def test_a_part_keeps_its_numbers_of_a_token(self, model: LatentModel, parts: int) -> None:
        latent = model.config.latent
        assert latent is not None
        for part in parts_of(model, model.rotation(parts)).parts:
            cache = part.kv_cache
            numbers = latent.rank // parts + latent.rotary_dim
            assert cache.bytes == cache.keys.untyped_storage().nbytes()
            assert cache.bytes == model.config.layers * SLOTS * numbers * 4

    def test_and_its_columns_of_the_weights(
        self, model: LatentModel, rotation: LatentRotation
    ) -> None:
        """For answers its columns of all heads, for prompts all columns of its heads."""
        attention = model.weights.layers[0].qkv
        assert isinstance(attention, LatentWeights)
        for part in parts_of(model, rotation).parts:
            own = part.weights.layers[0].qkv
            assert isinstance(own, LatentPartWeights)
            for name in ("absorb", "expand"):
                everything = getattr(attention, name).nbytes
                for held in (getattr(own, name), getattr(own, f"part_{name}")):
                    assert held.untyped_storage().nbytes() == everything // 2


def test_heads_are_divided_as_evenly_as_possible() -> None:
    shares = [head_share(7, rank, 3) for rank in range(3)]
    assert [(share.start, share.stop) for share in shares] == [(0, 2), (2, 4), (4, 7)]


def test_no_other_plan_is_for_parts() -> None:
    plan = AttentionPlan(parts=(KeyPart(np.zeros(1, np.int32)),), by_parts=True)
    batch = replace(text_batch(TEXT, 0), attention=(plan,))
    with pytest.raises(ValueError, match="request 0: latents in parts have no other keys"):
        parted_requests(batch)
