"""Training checkpoints: written whole or not at all, the newest good ones kept."""

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
from midfill.system.atomic import write_file, write_folder

_KEPT = 2
_STATE = "state.json"
_TENSORS = "tensors.pt"


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: changes of the weights made.
        rows: packed rows taken from the stream.
        tokens, characters: trained on.
        seconds: spent training, over all starts.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    characters: int = 0
    seconds: float = 0.0


def save_checkpoint(
    folder: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Write ``folder/step-N`` and remove old ones.

    Raises:
        MidfillError: it can't be written; the checkpoints before it are untouched.
    """
    target = folder / f"step-{progress.step:06d}"

    def write(temporary: Path) -> None:
        tensors = {"weights": _trained(model), "optimizer": optimizer.state_dict()}
        with (temporary / _TENSORS).open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        write_file(temporary / _STATE, json.dumps(asdict(progress)))

    write_folder(target, write, errors=(RuntimeError,))
    unfinished = folder.glob(".step-*")  # of a kill while one was written
    for old in (*_found(folder)[:-_KEPT], *unfinished):
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint below a run's folder, None where there is none."""
    found = _found(folder)
    return found[-1] if found else None


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Put a checkpoint's weights and optimizer state back.

    Raises:
        MidfillError: it is broken, or of a run that trains other weights.
    """
    try:
        progress = Progress(**json.loads((checkpoint / _STATE).read_text()))
        tensors: dict[str, Any] = torch.load(
            checkpoint / _TENSORS, map_location="cpu", weights_only=True
        )
        weights: dict[str, torch.Tensor] = tensors["weights"]
        moments = tensors["optimizer"]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise MidfillError(f"{checkpoint}: not a training checkpoint: {error}") from None
    except (EOFError, pickle.UnpicklingError):
        raise MidfillError(f"{checkpoint}: {_TENSORS} is broken") from None
    trained = _trained(model)
    if trained.keys() != weights.keys() or any(
        each.shape != weights[name].shape for name, each in trained.items()
    ):
        raise MidfillError(f"{checkpoint}: is of a run that trains other weights; use its recipe")
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(weights[name])
    optimizer.load_state_dict(moments)
    return progress


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())
