"""Trainable parameters of LoRA and of full training."""

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import write_variant

from midfill.lab.training.base_model import load_base_model
from midfill.lab.training.lora import make_trainable
from midfill.lab.training.recipe import TrainingRecipe
from midfill.models.checkpoints.opening import open_checkpoint


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
