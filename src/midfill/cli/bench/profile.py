"""midfill bench profile: where a step's time goes."""

from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.bench.options import (
    JsonOption,
)
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.reporting.publish import publish

if TYPE_CHECKING:
    pass


def profile(
    model: ModelArgument = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Take a model of this shape with random weights instead, see bench peers.",
        ),
    ] = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Show where a step's time goes on the CPU kernels, beside the least that it requires.

    MB and MFLOP are what a step requires: weights and KV read once, and the products. "least ms"
    is their time at the speed of memory, or at the rate that the chip reaches in registers;
    "reached" is that time as a share of the measured one. With --shape, --docs replaces the section
    of that shape.
    """
    from midfill.bench.peers.shapes import random_model
    from midfill.bench.profile import measure_profile, profile_markdown, profile_tables
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    if shape is not None and model is not None:
        raise MidfillError("--shape makes a model of its own: it goes without a model")
    with show_steps("loading") as progress:
        name = str(random_model(shape, progress)) if shape else model or DEFAULT_MODEL
        report = measure_profile(name, threads=threads, progress=progress)
    drawn, markdown = profile_tables(report), profile_markdown(report)
    section = f"profile-{shape}" if shape else "profile"
    publish(report, drawn, markdown, section=section, json=json, docs=docs)
