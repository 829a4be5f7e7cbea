"""``midfill top``: what a server is doing, in the terminal."""

import os
from typing import Annotated

import typer

from midfill.serving.options import API_KEY_VARIABLE, DEFAULT_URL

UrlOption = Annotated[str, typer.Option(metavar="URL", help="The server.")]
KeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help=f"Key to send, where metrics need one; by default {API_KEY_VARIABLE}'s first.",
    ),
]
_UNCUT = 1000  # columns; no line is padded to them
IntervalOption = Annotated[
    float,
    typer.Option("--interval", "-i", min=0.1, metavar="SECONDS", help="How often to read."),
]


def top(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    interval: IntervalOption = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print once, after one interval, and exit.")
    ] = False,
) -> None:
    """Show what a server is doing: requests, batch, cache, latencies, tenants. q quits.

    Without a terminal it prints once. The exit status is 1 if no server answers.
    """
    from functools import partial

    from rich.console import Console

    from midfill.serving.top.display import show_live, show_once
    from midfill.serving.top.history import read_snapshot

    if "://" not in url:
        url = f"http://{url}"
    key = api_key or next(iter(os.environ.get(API_KEY_VARIABLE, "").split()), None)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNCUT  # a pipe has no width, and 80 columns would cut lines off
    read = partial(read_snapshot, url, key)
    show = show_live if console.is_terminal and not once else show_once
    show(read, url, interval, console)
