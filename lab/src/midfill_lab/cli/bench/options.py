"""Options that several ``midfill bench`` commands share."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.values import parse_fim_tokens
from midfill.config import FimTokens
from midfill_lab.cli.outputs import writable

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
OutputTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
JsonOption = Annotated[
    Path | None, typer.Option(callback=writable, help="Write all figures to this file.")
]
