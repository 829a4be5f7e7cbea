"""Training on the terminal: steps as a bar, elsewhere as lines; examples with their fragments."""

import io
import random
import re
from pathlib import Path

from rich.console import Console

from midfill.infill.formats import custom_format
from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.cli.training_display import FRAGMENT_BORDER, StepDisplay, example_text
from midfill_lab.training.examples import ExampleMaker
from midfill_lab.training.holes import Hole
from midfill_lab.training.recipe import DataRecipe
from midfill_lab.training.run_folder import StepReport, TrainingState


def show(console: Console, first: int, steps: int) -> None:
    with StepDisplay(console, steps) as display:
        for step in range(first, steps + 1):
            display.show(StepReport(TrainingState(step=step), 2.0, 1e-3, 1000, 4.0))


def test_steps_are_lines_where_there_is_no_terminal() -> None:
    output = io.StringIO()
    show(Console(file=output, width=200), 1, 45)
    assert output.getvalue().splitlines() == [
        "step 3 of 45: loss 2.000, 250 tokens/s, 0:02:48 left",
        "step 20 of 45: loss 2.000, 250 tokens/s, 0:01:40 left",
        "step 40 of 45: loss 2.000, 250 tokens/s, 0:00:20 left",
        "step 45 of 45: loss 2.000, 250 tokens/s, 0:00:00 left",
    ]


def test_the_remaining_time_is_estimated_soon_after_resuming() -> None:
    output = io.StringIO()
    show(Console(file=output, width=200), 31, 35)
    assert [line.split(":")[0] for line in output.getvalue().splitlines()] == [
        "step 33 of 35",
        "step 35 of 35",
    ]


def test_steps_are_a_bar_on_a_terminal() -> None:
    output = io.StringIO()
    show(Console(file=output, width=100, force_terminal=True), 1, 5)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert "step 5 of 5" in plain
    assert "loss 2.000, 250 tokens/s" in plain
    assert " left" not in plain


def test_an_example_shows_its_sentinels_fragment_borders_and_answer(tiny_folder: Path) -> None:
    text = "total = été + 1  # <fim_middle>\n"
    tokenizer = open_checkpoint(tiny_folder).tokenizer
    format = custom_format("<fim_prefix>", "<fim_suffix>", "<fim_middle>", tokenizer.special_tokens)
    maker = ExampleMaker(tokenizer, format, 0, DataRecipe(fragment_share=0.0, typed_share=0.0))
    hole = Hole("line", 0, 9, 15, len(text), 4, "efim")
    shown = example_text(maker.make(text, hole, random.Random(0), fragments=True), tokenizer)
    assert shown.plain == (
        f"<fim_prefix>tota<fim_suffix>{text[15:]}<fim_middle>l = é{FRAGMENT_BORDER}"
        "té + 1<|endoftext|>"
    )
    styled = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    assert styled["<fim_suffix>"] == "bold cyan"
    assert styled["té + 1"] == "green"
    assert styled[FRAGMENT_BORDER] == "bold red"
