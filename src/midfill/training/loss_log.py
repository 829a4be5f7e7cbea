"""The loss log: a JSON line a step, kept in step with the checkpoints."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError
from midfill.system.atomic import write_file
from midfill.training.checkpoints import Progress


@dataclass(frozen=True)
class StepReport:
    """One change of the weights.

    Attributes:
        progress: after it.
        loss: nats a token, weighted as the recipe says.
        learning_rate: of the step.
        tokens, seconds: of the step.
    """

    progress: Progress
    loss: float
    learning_rate: float
    tokens: int
    seconds: float

    @property
    def tokens_a_second(self) -> float:
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
            "step": report.progress.step,
            "tokens": report.progress.tokens,
            "loss": round(report.loss, 5),
            "learning_rate": report.learning_rate,
            "tokens_a_second": round(report.tokens_a_second, 1),
        }
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise MidfillError(
                f"{self._file.name!s}: can't be written: {error.strerror or error}; the same "
                "command goes on from the last checkpoint"
            ) from None


@contextmanager
def open_loss_log(path: Path, step: int) -> Iterator[LossLog]:
    """Open a log to go on behind a step; lines of later steps, which a kill threw away, go.

    Raises:
        MidfillError: it can't be written.
    """
    kept = [line for line in read_loss_log(path) if line["step"] <= step]
    write_file(path, "".join(f"{json.dumps(line)}\n" for line in kept))
    with path.open("ab", buffering=0) as file:  # nothing is left to be written when it is closed
        yield LossLog(file)


def read_loss_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; none where there is no file, without a last one that a kill cut off."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
