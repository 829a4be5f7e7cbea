"""Trainable parameters of LoRA and of full training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from tiny_checkpoints import VOCAB, write_tiny, write_variant

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_merge import add_to_quantized
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.stored_tensor import StoredTensor
from midfill_lab.training.base_model import load_base_model
from midfill_lab.training.examples import PackedRow
from midfill_lab.training.lora import (
    QAT_ROUNDING,
    MergedLora,
    QuantizationAwareLora,
    make_trainable,
)
from midfill_lab.training.loss import InfillingLoss
from midfill_lab.training.recipe import TrainingRecipe


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3", "starcoder2"])
def test_lora_trains_updates_of_every_matrix_and_the_sentinels_rows(
    variant: str, tmp_path: Path
) -> None:
    base = load_base_model(open_checkpoint(write_variant(variant, tmp_path)), torch.bfloat16)
    model = make_trainable(base, TrainingRecipe(rank=3), [3, 1, 2])
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    linear = [
        name
        for name, each in base.named_modules()
        if hasattr(each, "lora_A") and not name.endswith("lm_head")
    ]
    per_layer = 6 if variant == "starcoder2" else 7
    assert len(linear) == 3 * per_layer
    assert len(trained) == 2 * len(linear) + 1
    assert all(each.dtype == torch.float32 for each in trained.values())
    (rows,) = [each for name, each in trained.items() if "trainable_tokens_delta" in name]
    assert rows.shape == (3, base.config.hidden_size)
    frozen = [each for each in model.parameters() if not each.requires_grad]
    assert {each.dtype for each in frozen} == {torch.bfloat16}


def test_the_seed_determines_the_initial_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path))

    def start(seed: int) -> list[torch.Tensor]:
        model = make_trainable(
            load_base_model(checkpoint, torch.float32), TrainingRecipe(seed=seed), [1]
        )
        return [each for name, each in model.named_parameters() if "lora_A" in name]

    assert all(map(torch.equal, start(0), start(0)))
    assert not any(map(torch.equal, start(0), start(1)))


def test_full_training_trains_everything(tmp_path: Path) -> None:
    base = load_base_model(open_checkpoint(write_variant("llama", tmp_path)), torch.float32)
    model = make_trainable(base, TrainingRecipe(method="full"), [1, 2, 3])
    assert all(each.requires_grad for each in model.parameters())


def adapted(variant: str, folder: Path, **settings: Any) -> Any:
    """Return a tiny model with LoRA updates that differ from zero."""
    base = load_base_model(open_checkpoint(write_variant(variant, folder)), torch.float32)
    model = make_trainable(base, TrainingRecipe(rank=3, alpha=5, **settings), [1, 2])
    torch.manual_seed(1)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_" in name:
                each.normal_(0, 0.05)
    return model


def row() -> PackedRow:
    draw = np.random.default_rng(0)
    ids = draw.integers(0, VOCAB, 40).astype(np.int32)
    weights = np.ones(40, np.float32)
    bounds = np.array([0, 25, 40], np.int32)
    weights[bounds[:-1]] = 0
    return PackedRow(ids, weights, np.zeros(40, np.bool_), bounds, 40)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    InfillingLoss(model, 0)(row()).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("variant", ["llama-tied", "qwen2", "starcoder2"])
def test_loss_and_gradients_are_those_of_pefts_layers(variant: str, tmp_path: Path) -> None:
    model = adapted(variant, tmp_path)
    expected_loss = float(InfillingLoss(model, 0)(row()).detach())
    expected = gradients(model)
    MergedLora(model)
    assert float(InfillingLoss(model, 0)(row()).detach()) == pytest.approx(expected_loss, rel=1e-5)
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        # Sums over tokens with terms of both signs: rounding is relative to the largest entry.
        difference = (found[name] - each).abs().max()
        assert float(difference) <= 1e-4 * float(each.abs().max())


def test_changed_updates_count_once_they_are_merged(tmp_path: Path) -> None:
    model = adapted("llama-tied", tmp_path)
    merged = MergedLora(model)
    before = float(InfillingLoss(model, 0)(row()).detach())
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.zero_()
    assert float(InfillingLoss(model, 0)(row()).detach()) == before
    merged.merge()
    after = float(InfillingLoss(model, 0)(row()).detach())
    with model.disable_adapter():
        assert float(InfillingLoss(model, 0)(row()).detach()) == pytest.approx(after, rel=1e-5)
    assert after != before


def test_attention_alone_can_be_trained(tmp_path: Path) -> None:
    model = adapted("llama-tied", tmp_path, lora_modules="attention")
    updated = {name for name in gradients(model) if "lora_A" in name}
    assert updated
    assert all(".self_attn." in name for name in updated)


class QuantisedCheckpoint:
    """A checkpoint with the layers' matrices quantised to Q4_1."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base
        self.config = base.config

    def names(self) -> list[str]:
        return self._base.names()

    def kind(self, name: str) -> str:
        return self.tensor(name).kind

    def tensor(self, name: str) -> StoredTensor:
        tensor = self._base.tensor(name)
        if len(tensor.shape) < 2 or not name.startswith("layers."):
            return tensor
        blocks = quantize(tensor.to_float32(), GGMLQuantizationType.Q4_1)
        return replace(tensor, kind="q4_1", data=blocks.reshape(tensor.shape[0], -1))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return QuantisedCheckpoint(
        open_checkpoint(write_tiny("llama", tmp_path_factory.mktemp("base")))
    )


@pytest.fixture
def model(quantised: Any) -> Any:
    model = make_trainable(
        load_base_model(quantised, torch.float32), TrainingRecipe(rank=4, alpha=8), [1]
    )
    generator = torch.Generator().manual_seed(0)
    for name, each in model.named_parameters():
        if "lora_B" in name:
            each.data.normal_(std=0.002, generator=generator)
    return model


def _served(quantised: Any, layer: Any, name: str) -> np.ndarray[Any, Any]:
    update = layer.get_delta_weight("default").detach().numpy()
    return add_to_quantized(quantised.tensor(name), update, QAT_ROUNDING).to_float32()


def test_frozen_weight_and_update_add_up_to_the_served_weight(quantised: Any, model: Any) -> None:
    qat = QuantizationAwareLora.find(model, quantised)
    assert qat is not None
    assert qat.requantise() > 0
    for path, name in (
        ("model.layers.0.self_attn.q_proj", "layers.0.q.weight"),
        ("model.layers.2.mlp.down_proj", "layers.2.down.weight"),
    ):
        layer = model.get_base_model().get_submodule(path)
        whole = layer.get_base_layer().weight + layer.get_delta_weight("default")
        np.testing.assert_allclose(
            whole.detach().numpy(), _served(quantised, layer, name), atol=1e-6
        )


def test_requantising_twice_changes_nothing(quantised: Any, model: Any) -> None:
    qat = QuantizationAwareLora.find(model, quantised)
    assert qat is not None
    qat.requantise()
    weight = model.get_base_model().get_submodule("model.layers.1.mlp.up_proj").get_base_layer()
    before = weight.weight.clone()
    qat.requantise()
    assert torch.equal(before, weight.weight)


def test_a_small_step_of_the_update_moves_few_codes(quantised: Any, model: Any) -> None:
    layer = model.get_base_model().get_submodule("model.layers.0.mlp.gate_proj")
    before = _served(quantised, layer, "layers.0.gate.weight")
    layer.lora_B["default"].weight.data.mul_(1.01)
    after = _served(quantised, layer, "layers.0.gate.weight")
    assert 0 <= np.mean(before != after) < 0.01


def test_an_untrained_update_adds_no_error(quantised: Any) -> None:
    model = make_trainable(
        load_base_model(quantised, torch.float32), TrainingRecipe(rank=4, alpha=8), [1]
    )
    qat = QuantizationAwareLora.find(model, quantised)
    assert qat is not None
    assert qat.requantise() == 0


def test_a_base_of_floats_has_no_quantised_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path))
    model = make_trainable(
        load_base_model(checkpoint, torch.float32), TrainingRecipe(rank=4, alpha=8), [1]
    )
    assert QuantizationAwareLora.find(model, checkpoint) is None
