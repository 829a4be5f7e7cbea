"""Merged LoRA layers: outputs and gradients are those of PEFT's own layers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, write_variant

from midfill.lab.training.base_model import load_base_model
from midfill.lab.training.lora import make_trainable
from midfill.lab.training.loss import InfillingLoss
from midfill.lab.training.merged_lora import MergedLora
from midfill.lab.training.packing import PackedRow
from midfill.lab.training.recipe import TrainingRecipe
from midfill.models.checkpoints.opening import open_checkpoint


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
