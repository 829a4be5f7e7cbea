"""The loss log has one line per step, whatever interrupted the run."""

from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.lab.training.checkpoints import TrainingState
from midfill.lab.training.loss_log import (
    LossLog,
    StepReport,
    open_loss_log,
    plot_loss,
    read_loss_log,
)


def report(step: int, loss: float = 2.0) -> StepReport:
    return StepReport(TrainingState(step=step, tokens=step * 100), loss, 1e-3, 100, 0.5)


def write(path: Path, first: int, last: int, loss: float = 2.0) -> None:
    with open_loss_log(path, first - 1) as log:
        for step in range(first, last + 1):
            log.write(report(step, loss))


def test_each_step_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "loss.jsonl"
    write(path, 1, 2)
    assert read_loss_log(path) == [
        {
            "step": step,
            "tokens": step * 100,
            "loss": 2.0,
            "learning_rate": 1e-3,
            "tokens_per_second": 200.0,
        }
        for step in (1, 2)
    ]


def test_lines_of_lost_steps_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    write(path, 1, 9, loss=2.0)
    write(path, 6, 8, loss=1.0)
    assert [(line["step"], line["loss"]) for line in read_loss_log(path)] == [
        *((step, 2.0) for step in range(1, 6)),
        *((step, 1.0) for step in range(6, 9)),
    ]


def test_a_line_that_a_kill_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    write(path, 1, 3)
    path.write_text(path.read_text()[:-20])
    assert [line["step"] for line in read_loss_log(path)] == [1, 2]
    write(path, 3, 3)
    assert [line["step"] for line in read_loss_log(path)] == [1, 2, 3]


def test_a_full_disk_is_reported_in_one_line() -> None:
    with (
        pytest.raises(MidfillError, match="/dev/full: can't be written: No space left"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        LossLog(full).write(report(1))


@pytest.mark.parametrize("steps", [1, 7, 100])
def test_the_loss_is_plotted(tmp_path: Path, steps: int) -> None:
    write(tmp_path / "loss.jsonl", 1, steps)
    plot_loss(tmp_path / "loss.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
