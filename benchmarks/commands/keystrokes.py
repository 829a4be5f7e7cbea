"""python -m benchmarks keystrokes: time to first token beside other work, and what drafts cost."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption, ShapeOption, model_or_shape
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.system.reporting.publish import publish


def keystrokes(
    model: ModelArgument = None,
    shape: ShapeOption = None,
    prompt: Annotated[
        int, typer.Option(min=256, help="Tokens of the long prompt beside which users type.")
    ] = 2000,
    keystrokes: Annotated[int, typer.Option(min=2, help="Of each kind.")] = 20,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure keystrokes beside long prompts and idle prefill, and what drafts cost.

    With --shape, --docs replaces the section of that shape.
    """
    from rich.console import Group

    from benchmarks.keystrokes import (
        keystrokes_markdown,
        keystrokes_tables,
        measure_keystrokes,
    )

    with show_steps("loading") as progress:
        name = model_or_shape(model, shape, progress)
        report = measure_keystrokes(
            name, prompt=prompt, keystrokes=keystrokes, threads=threads, progress=progress
        )
    drawn = Group(*(table.drawn(title_justify="left") for table in keystrokes_tables(report)))
    section = f"keystrokes-{shape}" if shape else "keystrokes"
    publish(report, drawn, keystrokes_markdown(report), section=section, json=json, docs=docs)
