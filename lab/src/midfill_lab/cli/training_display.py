"""What the ``midfill train`` commands print: settings, steps, examples, and a corpus's survey."""

from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from midfill.models.tokens.tokenizer import Tokenizer
from midfill_lab.training.examples import Example
from midfill_lab.training.run_folder import StepReport, newest_checkpoint
from midfill_lab.training.stream import Survey
from midfill_lab.training.trainer import CHECKPOINTS, resolve_precision
from midfill_lab.training.training_run import TrainingRun

FRAGMENT_BORDER = "│"
_SENTINEL, _LEARNED, _BROKEN, _BORDER = "bold cyan", "green", "dim", "bold red"
_FIRST_LINE = 3  # steps until the remaining time can be estimated
_LINE_INTERVAL = 20  # steps between two lines
_LOSS_MEMORY = 0.95  # of the running mean of the loss


class StepDisplay:
    """Shows the mean loss, the speed and the remaining time of a run.

    It is a progress bar on a terminal, and a line every few steps elsewhere.

    Args:
        console: where to print.
        steps: number of steps of the whole run.
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
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("", total=steps, figures="first step")

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
        """Show one more step."""
        mean = report.loss if self._loss is None else self._loss
        self._loss = mean = _LOSS_MEMORY * mean + (1 - _LOSS_MEMORY) * report.loss
        step = report.state.step
        figures = f"loss {mean:.3f}, {report.tokens_per_second:.0f} tokens/s"
        self._shown += 1
        self._seconds += report.seconds
        self._bars.update(self._task, completed=step, figures=figures)
        due = self._shown == _FIRST_LINE or step % _LINE_INTERVAL == 0 or step == self._steps
        if due and not self._console.is_terminal:
            left = timedelta(seconds=round(self._seconds / self._shown * (self._steps - step)))
            self._console.print(f"step {step} of {self._steps}: {figures}, {left} left")


def print_settings(console: Console, run: TrainingRun) -> None:
    """Print what a run is about to do."""
    recipe, stream = run.trainer.recipe, run.trainer.stream
    corpus, format = stream.corpus, stream.maker.format
    files = len(corpus.files)
    documents = [f"{files:,} file{'s' if files > 1 else ''}"] if files else []
    documents += [path.name for path in corpus.records]
    trained = sum(each.numel() for each in run.trainer.model.parameters() if each.requires_grad)
    method = "all weights" if recipe.method == "full" else f"LoRA of rank {recipe.rank}"
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} CPU threads"
    sentinels = (format.prefix, format.suffix, format.middle)
    checkpoint = newest_checkpoint(run.inputs.folder / CHECKPOINTS)
    rows: dict[str, str | Path] = {
        "base": run.checkpoint.path,
        "documents": ", ".join(documents),
        "FIM tokens": " ".join(each.text for each in sentinels if each is not None),
        "text": "in fragments" if recipe.data.fragments else "whole",
        "training": f"{method}, {trained:,} parameters",
        "device": f"{device}, {resolve_precision(recipe.precision)}",
        "length": f"{recipe.tokens:,} tokens, {recipe.steps:,} steps",
    }
    if checkpoint is not None:
        rows["continuing"] = checkpoint
    elif run.trainer.start_from is not None:
        rows["starting from"] = run.trainer.start_from
    for name, value in rows.items():
        console.print(f"{name:>13}: {value}", soft_wrap=True, markup=False)


def print_survey(console: Console, survey: Survey, tokenizer: Tokenizer) -> None:
    """Print a survey's sample examples, then its figures."""
    for number, example in enumerate(survey.samples, 1):
        hole = example.hole
        console.rule(
            f"example {number}: {hole.kind} hole of {hole.end - hole.caret} characters, "
            f"{hole.layout} layout, {len(example.ids)} tokens"
        )
        console.print(example_text(example, tokenizer), soft_wrap=True)
    if survey.samples:
        console.rule()
    table = Table(show_header=False, box=None)
    refused = ", ".join(f"{reason} {count:,}" for reason, count in survey.refused.most_common())
    licences = ", ".join(f"{name} {count:,}" for name, count in survey.licences.most_common())
    kinds = ", ".join(
        f"{kind} {layout} {count:,}" for (kind, layout), count in sorted(survey.examples.items())
    )
    examples = survey.examples.total()
    read = "all of them" if survey.complete else "there are more"
    table.add_row("documents", f"{survey.documents:,} read ({read}), {survey.kept:,} kept")
    table.add_row("refused", refused or "none")
    table.add_row("licences", licences)
    table.add_row("examples", f"{examples:,}: {kinds}")
    table.add_row("longer than a row", f"{survey.dropped:,}")
    table.add_row(
        "tokens",
        f"{survey.tokens:,}, {survey.learned / survey.tokens:.0%} of them learned; "
        f"{survey.cuts / examples:.1f} cuts per example",
    )
    table.add_row("speed", f"{survey.tokens / survey.seconds:,.0f} tokens/s")
    console.print(table)


def example_text(example: Example, tokenizer: Tokenizer) -> Text:
    """Return an example as text: sentinels by name, a border wherever a fragment starts.

    Tokens that are input only are plain, learned ones green. Broken tokens, see
    ``examples.broken_token_mask``, are dim.
    """
    text = Text()
    pending, pending_style = b"", ""
    target = 1 + max(
        at for at, each in enumerate(example.ids[:-1]) if not tokenizer.token_bytes(int(each))
    )

    def flush(style: str = "") -> None:
        nonlocal pending, pending_style
        text.append(pending.decode("utf-8", "replace"), pending_style)
        pending, pending_style = b"", style

    for at, token_id in enumerate(map(int, example.ids)):
        if at in example.fragment_starts:
            flush()
            text.append(FRAGMENT_BORDER, _BORDER)
        token_bytes = tokenizer.token_bytes(token_id)
        style = "" if at < target else _LEARNED if example.weights[at] else _BROKEN
        if not token_bytes:
            flush()
            text.append(tokenizer.token_text(token_id), _SENTINEL)
        elif style != pending_style:
            flush(style)
        pending += token_bytes
    flush()
    return text
