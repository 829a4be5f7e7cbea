"""``midfill keys``: files of API keys, for ``midfill serve --api-key-file``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Make and remove API keys. The file holds digests, never a key.",
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The file of keys.")]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Whose key; logs and metrics show the name.")
]

_MAX_LIMIT = 10**12 - 1


@app.command()
def add(
    file: FileArgument,
    name: NameArgument,
    monitor: Annotated[
        bool,
        typer.Option(
            "--monitor",
            help="The key reads /metrics, the dashboard and the API's description, and nothing"
            " else. Other keys don't read these any more.",
        ),
    ] = False,
) -> None:
    """Make a key and print it, once; a name may have several, which share one cache."""
    from midfill.serving.server.key_file import add_key, read_key_file

    key = add_key(file, name, monitor=monitor)
    count = sum(each.name == name for each in read_key_file(file).keys)
    typer.echo(key)
    typer.echo(
        f"This is the key of {name}; {file} holds only its digest, so it can't be shown again.",
        err=True,
    )
    if count > 1:
        typer.echo(
            f"{name} has {count} keys now; remove the older ones with: midfill keys remove"
            f" {file} {name} --keep-newest",
            err=True,
        )
    _tell_servers()


@app.command("list")
def list_keys(file: FileArgument) -> None:
    """List who has keys, how many, and what they may do."""
    from collections import Counter

    from midfill.serving.server.key_file import EVERYONE, format_limits, read_key_file

    found = read_key_file(file)
    for name, count in Counter(key.name for key in found.keys).items():
        words = [name, f"{count} {'key' if count == 1 else 'keys'}"]
        words += ["monitor"] if name in found.monitors else []
        words += [format_limits(found.limits[name])] if name in found.limits else []
        typer.echo("  ".join(words))
    if EVERYONE in found.limits:
        typer.echo(f"{EVERYONE}  {format_limits(found.limits[EVERYONE])}")


@app.command()
def limit(
    file: FileArgument,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Whose limits; '*' is for all without their own.")
    ],
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=1, max=_MAX_LIMIT, metavar="NUMBER", help="POST requests per minute."),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MAX_LIMIT,
            metavar="NUMBER",
            help="Tokens per minute, of prompts and answers.",
        ),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MAX_LIMIT, metavar="NUMBER", help="Requests that generate at the same time."
        ),
    ] = None,
) -> None:
    """Limit what a name's keys may use; without options, its limits are removed.

    Beyond a limit, requests are refused with status 429.
    """
    from midfill.serving.server.key_file import format_limits, set_limits
    from midfill.serving.server.limits import TenantLimits

    limits = TenantLimits(
        requests=requests_per_minute, tokens=tokens_per_minute, running=max_running
    )
    set_limits(file, name, limits)
    typer.echo(f"{name}: {format_limits(limits) or 'no limits'}", err=True)
    _tell_servers()


@app.command()
def remove(
    file: FileArgument,
    name: NameArgument,
    keep_newest: Annotated[
        bool, typer.Option("--keep-newest", help="Keep the key that was made last.")
    ] = False,
) -> None:
    """Remove a name's keys."""
    from midfill.errors import MidfillError
    from midfill.serving.server.key_file import remove_keys

    count = remove_keys(file, name, keep_newest=keep_newest)
    if not count:
        kept = "only one key" if keep_newest else "no key"
        raise MidfillError(f"{file} has {kept} of {name}")
    typer.echo(f"{count} {'key' if count == 1 else 'keys'} of {name} removed", err=True)
    _tell_servers()


def _tell_servers() -> None:
    typer.echo("A running server reads its file again on SIGHUP.", err=True)
