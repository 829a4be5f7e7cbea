"""Steps are shown as lines where there is no terminal, and as a bar where there is one."""

import io
import re

from rich.console import Console

from midfill.training.checkpoints import Progress
from midfill.training.loss_log import StepReport
from midfill.training.step_display import StepDisplay


def show(console: Console, first: int, steps: int) -> None:
    with StepDisplay(console, steps) as display:
        for step in range(first, steps + 1):
            display.show(StepReport(Progress(step=step), 2.0, 1e-3, 1000, 4.0))


def test_lines() -> None:
    output = io.StringIO()
    show(Console(file=output, width=200), 1, 45)
    assert output.getvalue().splitlines() == [
        "step 3 of 45: loss 2.000, 250 tokens/s, 0:02:48 to go",
        "step 20 of 45: loss 2.000, 250 tokens/s, 0:01:40 to go",
        "step 40 of 45: loss 2.000, 250 tokens/s, 0:00:20 to go",
        "step 45 of 45: loss 2.000, 250 tokens/s, 0:00:00 to go",
    ]


def test_the_time_to_go_is_told_soon_after_going_on() -> None:
    output = io.StringIO()
    show(Console(file=output, width=200), 31, 35)
    assert [line.split(":")[0] for line in output.getvalue().splitlines()] == [
        "step 33 of 35",
        "step 35 of 35",
    ]


def test_a_bar() -> None:
    output = io.StringIO()
    show(Console(file=output, width=100, force_terminal=True), 1, 5)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert "step 5 of 5" in plain
    assert "loss 2.000, 250 tokens/s" in plain
    assert "to go" not in plain
