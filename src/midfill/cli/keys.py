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


@app.command()
def add(file: FileArgument, name: NameArgument) -> None:
    """Make a key and print it, once; a name may have several, which share one cache."""
    from midfill.server.key_file import add_key, read_keys

    key = add_key(file, name)
    count = sum(each.name == name for each in read_keys(file))
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
    """List who has keys, and how many."""
    from collections import Counter

    from midfill.server.key_file import read_keys

    for name, count in Counter(key.name for key in read_keys(file)).items():
        typer.echo(f"{name}  {count} {'key' if count == 1 else 'keys'}")


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
    from midfill.server.key_file import remove_keys

    count = remove_keys(file, name, keep_newest=keep_newest)
    if not count:
        kept = "only one key" if keep_newest else "no key"
        raise MidfillError(f"{file} has {kept} of {name}")
    typer.echo(f"{count} {'key' if count == 1 else 'keys'} of {name} removed", err=True)
    _tell_servers()


def _tell_servers() -> None:
    typer.echo("A running server reads its file again on SIGHUP.", err=True)
