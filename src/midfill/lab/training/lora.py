"""Trainable parameters: LoRA updates and the sentinels' embedding rows, or all weights."""

from collections.abc import Sequence
from typing import Any

import torch

from midfill.lab.training.recipe import TrainingRecipe

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA_MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj", "c_fc", "c_proj")


def make_trainable(model: Any, recipe: TrainingRecipe, sentinel_ids: Sequence[int]) -> Any:
    """Return the model with gradients required for exactly what the recipe trains, in float32.

    Args:
        model: a transformers causal model; it is modified.
        recipe: method, rank and alpha.
        sentinel_ids: tokens whose embedding rows are trained in addition to LoRA's updates.

    Returns:
        The model itself for full training, PEFT's wrapper around it for LoRA.
    """
    if recipe.gradient_checkpointing:
        # Older releases of transformers have only the second name.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.enable_input_require_grads()
    if recipe.method == "full":
        model.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model

    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    chosen = ATTENTION_MODULES if recipe.lora_modules == "attention" else LORA_MODULES
    torch.manual_seed(recipe.seed)
    wrapped = get_peft_model(
        model,
        LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules=sorted(leaves.intersection(chosen)),
            trainable_token_indices=sorted(sentinel_ids),
            task_type="CAUSAL_LM",
        ),
    )
    for each in wrapped.parameters():
        if each.requires_grad:
            each.data = each.data.float()
    return wrapped
