"""The loss log: one JSON line per step, consistent with the checkpoints, and its plot."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from midfill.errors import MidfillError
from midfill.lab.training.checkpoints import TrainingState
from midfill.system.files import write_file


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
