"""StepDisplay: a run's steps on the terminal, or as lines now and then where there is none."""

from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from midfill.training.loss_log import StepReport

_FIRST_LINE = 3  # steps until the time to go can be told
_LINE_EVERY = 20
_MEMORY = 0.95  # of the running mean of the loss


class StepDisplay:
    """Shows the mean loss, the speed and the time to go.

    Args:
        console: where to.
        steps: of the whole run.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._loss: float | None = None
        self._shown = 0
        self._seconds = 0.0
        self._bars = Progress(
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("", total=steps, told="first step")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def show(self, report: StepReport) -> None:
        """Show one step more."""
        mean = report.loss if self._loss is None else self._loss
        self._loss = mean = _MEMORY * mean + (1 - _MEMORY) * report.loss
        step, speed = report.progress.step, report.tokens_a_second
        told = f"loss {mean:.3f}, {speed:.0f} tokens/s"
        self._shown += 1
        self._seconds += report.seconds
        self._bars.update(self._task, completed=step, told=told)
        wanted = self._shown == _FIRST_LINE or step % _LINE_EVERY == 0 or step == self._steps
        if wanted and not self._console.is_terminal:
            left = timedelta(seconds=round(self._seconds / self._shown * (self._steps - step)))
            self._console.print(f"step {step} of {self._steps}: {told}, {left} to go")
