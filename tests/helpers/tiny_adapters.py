"""Tiny LoRA adapters for tests: made by the PEFT library on a model of ``tiny_checkpoints``."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SPECIAL_TOKENS
from transformers import AutoModelForCausalLM

from midfill.models.checkpoints.opening import open_checkpoint

END_OF_TEXT, PREFIX, MIDDLE, SUFFIX = SPECIAL_TOKENS
# Not the order in which any family uses these tokens, so that a mix-up shows.
FIM = {"prefix": MIDDLE, "suffix": PREFIX, "middle": SUFFIX, "stop": [END_OF_TEXT]}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base: Path, folder: Path, *, size: float = 0.2, **settings: Any) -> Path:
    """Write an adapter with random A and B, and embedding rows if ``settings`` name any.

    Args:
        base: a checkpoint's folder.
        folder: where to; it is returned.
        size: standard deviation of what is trained.
        settings: of PEFT's LoraConfig, rank 4 on all linear layers if they don't say.
    """
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": LINEAR} | settings))
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(adapted.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def write_record(folder: Path, base: Path | None, /, **fields: Any) -> None:
    """Write an adapter's midfill.json; ``fields`` replace some of it."""
    record: dict[str, Any] = {"format": 1, "fim": FIM, "fragments": True}
    if base is not None:
        digest = open_checkpoint(base).content_digest
        record["base"] = {"name": "tiny", "digest": digest, "licence": "Apache-2.0"}
    (folder / "midfill.json").write_text(json.dumps(record | fields))


def reference_adapted(base: Path, folder: Path) -> torch.nn.Module:
    """transformers' model with PEFT's adapter on it, as PEFT runs it."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    adapted: torch.nn.Module = PeftModel.from_pretrained(model, folder).eval()
    return adapted


def edit_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Replace fields of adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Replace the tensors of adapter_model.safetensors."""
    path = folder / "adapter_model.safetensors"
    save_file({name: t.contiguous() for name, t in edit(load_file(path)).items()}, path)
