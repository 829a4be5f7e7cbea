"""``python -m benchmarks shape``, and options of other commands that take a shape."""

from collections.abc import Callable
from typing import Annotated

import typer

from benchmarks.shapes.random_model import random_model
from midfill.cli.progress import show_steps
from midfill.errors import OptionError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL

ShapeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Take a model of this shape with random weights instead, see 'shape'.",
    ),
]
ShapeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="1.5b (1 GB; with what is made of it for peers 5 GB), 7b (4 GB), 30b-a3b (17 GB),"
        " these as 1.5b-q4_k_m, 7b-q4_k_m and 30b-a3b-q4_k_m, too, coder-v2-lite (9 GB),"
        " gpt-oss-20b (12 GB), granite-4.0-h-micro (2 GB), qwen3-next-80b-a3b (45 GB), olmo2-7b"
        " (4 GB) and gemma-3n-e2b (4 GB).",
    ),
]
LayersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Write so many layers instead of the shape's own."),
]


def model_or_shape(
    model: str | None, shape: str | None, progress: Callable[[str], None] = lambda _: None
) -> str:
    """Return the model to load: the one named, one of a shape, or the default model.

    Raises:
        MidfillError: both are given, or a model of the shape can't be made.
    """
    if shape is not None and model is not None:
        raise OptionError("--shape makes a model of its own: it goes without a model")
    return str(random_model(shape, progress)) if shape else model or DEFAULT_MODEL


def shape(name: ShapeArgument, layers: LayersOption = None) -> None:
    """Write a model of a shape with random weights into the cache folder once; print its path."""
    with show_steps("preparing") as progress:
        path = random_model(name, progress, layers)
    typer.echo(path)
