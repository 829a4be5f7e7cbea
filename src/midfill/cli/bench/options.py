"""Options that several ``midfill bench`` commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.outputs import writable
from midfill.cli.values import parse_fim_tokens
from midfill.config import FimTokens
from midfill.errors import OptionError

UrlOption = Annotated[
    str | None,
    typer.Option(
        help="An OpenAI-style server, e.g. http://127.0.0.1:8080/v1; if not set, the model is"
        " loaded into this process."
    ),
]
LoadedModelOption = Annotated[
    str | None, typer.Option(help="Model to load into this process; the default model if not set.")
]
ClientFimTokensOption = Annotated[
    FimTokens | None,
    typer.Option(
        parser=parse_fim_tokens,
        metavar="PRE,SUF,MID",
        help="The model's FIM tokens. A model without any, loaded into this process, gets three"
        " spare tokens: that changes its answers, not its speed.",
    ),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Take a model of this shape with random weights instead, see bench peers.",
    ),
]
OutputTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
JsonOption = Annotated[
    Path | None, typer.Option(callback=writable, help="Write all figures to this file.")
]
CompareOption = Annotated[
    str | None,
    typer.Option(
        metavar="COMMIT",
        help="Measure this tree beside a commit of its git repository, in turn, and show how many"
        " times as fast it is, with 95% intervals.",
    ),
]


def model_or_shape(
    model: str | None, shape: str | None, progress: Callable[[str], None] = lambda _: None
) -> str:
    """Return the model to load: the one named, one of a shape, or the default model.

    Raises:
        MidfillError: both are given, or a model of the shape can't be made.
    """
    from midfill.lab.bench.peers.shapes import random_model
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    if shape is not None and model is not None:
        raise OptionError("--shape makes a model of its own: it goes without a model")
    return str(random_model(shape, progress)) if shape else model or DEFAULT_MODEL
