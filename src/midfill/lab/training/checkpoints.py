"""Training checkpoints: each appears whole or not at all, and the newest two are kept."""

import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from midfill.errors import MidfillError
from midfill.system.files import write_file, write_folder

_KEPT = 2
_STATE = "state.json"
_TENSORS = "tensors.pt"

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File with the weights of an adapter in PEFT's format."""


@dataclass(frozen=True)
class TrainingState:
    """How far a run has come.

    Attributes:
        step: finished optimizer steps.
        rows: packed rows taken from the stream.
        tokens, characters: trained on.
        seconds: spent in training steps, over all starts.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    characters: int = 0
    seconds: float = 0.0


def save_checkpoint(
    folder: Path, state: TrainingState, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Write ``folder/step-N`` and remove old checkpoints.

    Raises:
        MidfillError: it can't be written; earlier checkpoints are untouched.
    """
    target = folder / f"step-{state.step:06d}"

    def write(temporary: Path) -> None:
        tensors = {"weights": _trained_parameters(model), "optimizer": optimizer.state_dict()}
        with (temporary / _TENSORS).open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        write_file(temporary / _STATE, json.dumps(asdict(state)))

    write_folder(target, write, errors=(RuntimeError,))
    unfinished = folder.glob(".step-*")  # left by a kill during writing
    for old in (*_find_checkpoints(folder)[:-_KEPT], *unfinished):
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, None if there is none."""
    found = _find_checkpoints(folder)
    return found[-1] if found else None


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> TrainingState:
    """Load a checkpoint's weights and optimizer state into a model and its optimizer.

    Raises:
        MidfillError: it is broken, or from a run that trains other weights.
    """
    try:
        state = TrainingState(**json.loads((checkpoint / _STATE).read_text()))
        tensors: dict[str, Any] = torch.load(
            checkpoint / _TENSORS, map_location="cpu", weights_only=True
        )
        weights: dict[str, torch.Tensor] = tensors["weights"]
        moments = tensors["optimizer"]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise MidfillError(f"{checkpoint}: not a training checkpoint: {error}") from None
    except (EOFError, pickle.UnpicklingError):
        raise MidfillError(f"{checkpoint}: {_TENSORS} is broken") from None
    trained = _trained_parameters(model)
    if trained.keys() != weights.keys() or any(
        each.shape != weights[name].shape for name, each in trained.items()
    ):
        raise MidfillError(f"{checkpoint}: is from a run that trains other weights; use its recipe")
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(weights[name])
    optimizer.load_state_dict(moments)
    return state


def load_adapter(folder: Path, model: nn.Module) -> None:
    """Load the weights of a PEFT adapter into a model to train on.

    Its ``lora_alpha`` is not read: updates are scaled by the alpha that ``model`` was made with.

    Raises:
        MidfillError: it is broken, or updates other weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise MidfillError(f"{folder}: not an adapter: {error}") from None
    trained = {
        name.replace(".default", ""): each
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    if trained.keys() != stored.keys() or any(
        each.shape != stored[name].shape for name, each in trained.items()
    ):
        raise MidfillError(
            f"{folder}: updates other weights than the recipe's; use its rank and lora_modules"
        )
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(stored[name])


def _trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _find_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())
