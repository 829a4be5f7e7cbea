"""Quantization-aware training: the forward pass computes with the weights that will be served."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from tiny_checkpoints import write_tiny

from midfill.lab.training.base_model import load_base_model
from midfill.lab.training.lora import make_trainable
from midfill.lab.training.quantization_aware import QAT_ROUNDING, QuantizationAwareLora
from midfill.lab.training.recipe import TrainingRecipe
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_merge import add_to_quantized
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.stored_tensor import StoredTensor


class QuantisedCheckpoint:
    """A checkpoint with the layers' matrices quantised to Q4_1."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base
        self.config = base.config

    def names(self) -> list[str]:
        return self._base.names()

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
