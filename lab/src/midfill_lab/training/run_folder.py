"""What a run keeps in its folder: what decides it, its checkpoints, and the loss of each step.

``run.json`` says what decides the run, so that no other run continues in its place. Each checkpoint
appears whole or not at all, and the newest two are kept. The loss log has one JSON line per step,
consistent with the checkpoints.
"""

import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.system.files import write_file, write_folder
from midfill_lab.training.recipe import TrainingRecipe, with_current_names

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
    if not _copy_weights(weights, _trained_parameters(model)):
        raise MidfillError(f"{checkpoint}: is from a run that trains other weights; use its recipe")
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
    if any(each.dtype == torch.float8_e4m3fn for each in stored.values()):
        raise MidfillError(
            f"{folder}: is in float8, with factors that were scaled for it; start from the run's "
            "checkpoint"
        )
    trained = _trained_parameters(model)
    if not _copy_weights(
        stored, {name.replace(".default", ""): each for name, each in trained.items()}
    ):
        raise MidfillError(
            f"{folder}: updates other weights than the recipe's; use its rank and lora_modules"
        )


def _trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


@torch.no_grad()
def _copy_weights(stored: Mapping[str, torch.Tensor], trained: Mapping[str, nn.Parameter]) -> bool:
    """Copy stored weights into a model's; return whether they are of the same names and shapes."""
    if trained.keys() != stored.keys() or any(
        each.shape != stored[name].shape for name, each in trained.items()
    ):
        return False
    for name, each in trained.items():
        each.copy_(stored[name])
    return True


def _find_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    Attributes:
        state: of the run, after the step.
        loss: nats per token, weighted as the recipe says.
        learning_rate: of the step.
        tokens, seconds: of the step.
    """

    state: TrainingState
    loss: float
    learning_rate: float
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of the step."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class LossLog:
    """An open log, see ``open_loss_log``."""

    _file: FileIO

    def write(self, report: StepReport) -> None:
        """Append a step's line.

        Raises:
            MidfillError: it can't be written.
        """
        line = {
            "step": report.state.step,
            "tokens": report.state.tokens,
            "loss": round(report.loss, 5),
            "learning_rate": report.learning_rate,
            "tokens_per_second": round(report.tokens_per_second, 1),
        }
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise MidfillError(
                f"{self._file.name!s}: can't be written: {error.strerror or error}; the same "
                "command continues from the last checkpoint"
            ) from None


@contextmanager
def open_loss_log(path: Path, step: int) -> Iterator[LossLog]:
    """Open a log to continue after a step; lines of later steps, lost in a kill, are removed.

    Raises:
        MidfillError: it can't be written.
    """
    kept = [line for line in read_loss_log(path) if line["step"] <= step]
    write_file(path, "".join(f"{json.dumps(line)}\n" for line in kept))
    with path.open("ab", buffering=0) as file:  # unbuffered: closing it can't fail
        yield LossLog(file)


def read_loss_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, up to one that a kill cut off; none if there is no file."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def plot_loss(log: Path, picture: Path) -> None:
    """Plot a loss log: every step, and a running mean over a twentieth of the run.

    Args:
        log: JSON lines with "tokens" and "loss".
        picture: the file to write; its suffix chooses the format.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    lines = read_loss_log(log)
    tokens = np.array([line["tokens"] for line in lines]) / 1000
    losses = np.array([line["loss"] for line in lines])
    width = max(1, len(losses) // 20)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(tokens, losses, color="0.8", linewidth=0.8, label="each step")
    axes.plot(tokens[width - 1 :], smooth, color="tab:blue", label=f"mean of {width} steps")
    axes.set(xlabel="thousand tokens trained on", ylabel="loss, nats per token", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)


_RUN_FILE = "run.json"
_MAY_CHANGE = ("precision", "gradient_checkpointing")  # settings that may differ on resuming


def describe_run(
    checkpoint: Checkpoint, format: FimFormat, recipe: TrainingRecipe
) -> dict[str, Any]:
    """Return what decides a run besides its documents: base, sentinels, recipe; plain values."""
    sentinels = (format.prefix, format.suffix, format.middle)
    run = {
        "base": checkpoint.content_digest,
        "fim_tokens": [each.text for each in sentinels if each is not None],
        **recipe.as_dict(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(run))  # tuples become lists
    return plain


def claim_folder(folder: Path, run: Mapping[str, Any]) -> None:
    """Write the description of a folder's run, unless it is already there.

    Raises:
        MidfillError: the folder can't be written.
    """
    if not (folder / _RUN_FILE).is_file():
        write_file(folder / _RUN_FILE, json.dumps(run, indent=2) + "\n")


def check_folder(folder: Path, run: Mapping[str, Any]) -> None:
    """Check that a folder belongs to this run or to none.

    Raises:
        MidfillError: it belongs to another; the message says what differs.
    """
    path = folder / _RUN_FILE
    if not path.is_file():
        return
    try:
        before = dict(_flatten(with_current_names(json.loads(path.read_text(encoding="utf-8")))))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise MidfillError(f"{path}: can't be read: {error}") from None
    differing = [
        f"{name} {before.get(name)!r} there, {value!r} now"
        for name, value in _flatten(run)
        if name not in _MAY_CHANGE and before.get(name) != value
    ]
    if differing:
        raise MidfillError(
            f"{folder}: holds another run ({'; '.join(differing[:3])}); use another --output, or "
            "continue with the same settings"
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value))
    return pairs
