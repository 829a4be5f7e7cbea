"""``midfill lsp``: a language server on standard input and output, started by editors."""

import os
import sys
from typing import Annotated, Literal

import typer

from midfill.errors import MidfillError

API_KEY_VARIABLE = "MIDFILL_API_KEY"

UrlOption = Annotated[str | None, typer.Option(metavar="URL", help="Server to ask.")]
OwnModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m",
        help="Serve this model in a process of its own instead of asking a server.",
    ),
]  # fmt: skip
StartOption = Annotated[
    bool,
    typer.Option(
        "--start",
        help="If no server answers, serve the default model in a process of its own.",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(metavar="KEY", help=f"Key for the server; by default {API_KEY_VARIABLE}'s first."),
]
LinesOption = Annotated[
    Literal["single", "block"] | None,
    typer.Option(help="Complete lines, or the rest of a block at the end of a line."),
]
MinConfidenceOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        metavar="P",
        help="Offer no completion whose first line is right with a lower probability, unless it is"
        " asked for; by default what the server says.",
    ),
]
DebounceOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=10_000,
        metavar="MS",
        help="Milliseconds without a change before the model is asked.",
    ),
]


def lsp(
    url: UrlOption = None,
    model: OwnModelOption = None,
    start: StartOption = False,
    api_key: KeyOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, max=4096, help="Maximum tokens of a completion."),
    ] = None,
    lines: LinesOption = None,
    min_confidence: MinConfidenceOption = None,
    debounce_ms: DebounceOption = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What to log on stderr.")
    ] = "warning",
    stdio: Annotated[bool, typer.Option("--stdio", hidden=True)] = False,
    client_process: Annotated[int, typer.Option("--clientProcessId", hidden=True)] = 0,
) -> None:
    """Complete code in editors: a language server on stdin and stdout, which the editor starts.

    It asks a running midfill server. Settings of the editor count more than these options.
    """
    from midfill.system.extras import require

    require("midfill lsp", ["pygls", "httpx"], extra="lsp")
    from midfill.lsp.settings import Settings
    from midfill.lsp.stdio import log_to_stderr, serve_stdio

    log_to_stderr(log_level)
    given = {
        "url": url, "model": model, "start": start or None,
        "apiKey": api_key or next(iter(os.environ.get(API_KEY_VARIABLE, "").split()), None),
        "maxTokens": max_tokens, "lines": lines, "debounceMs": debounce_ms,
        "minConfidence": min_confidence,
    }  # fmt: skip
    settings, problems = Settings().updated(given)
    if problems:
        raise MidfillError(problems[0])
    if sys.stdin.isatty():
        typer.echo("midfill lsp: editors start this command and talk to it here (LSP)", err=True)
    sys.exit(serve_stdio(settings))
