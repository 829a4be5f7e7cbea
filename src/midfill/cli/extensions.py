"""Commands that other distributions bring, midfill-lab first of all.

A distribution names them as entry points of the group ``midfill.commands``: "eval" is a command of
midfill, "methods.calibrate" one of ``midfill methods``.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points

import typer

from midfill.errors import OptionError

_LAB = {
    "bench": "Measure speed, methods and other servers on this machine.",
    "eval": "Measure how good a model's answers are.",
    "train": "Teach a model to infill.",
    "methods.calibrate": "Compute what a method needs to know of a model.",
}
"""The commands of midfill-lab: without it, they say how to install it."""

_INSTALL = "pip install midfill-lab (in a source checkout: pip install -e lab)"


def add_extensions(places: Mapping[str, typer.Typer]) -> None:
    """Add the commands that installed distributions bring.

    Args:
        places: the commands that can have more subcommands, by name; "" is midfill itself.
    """
    brought = {entry.name: entry for entry in entry_points(group="midfill.commands")}
    for name in sorted({*_LAB, *brought}):
        place, _, command = name.rpartition(".")
        if place not in places:
            continue
        if name not in brought:
            _add_hint(places[place], name, f"is in midfill-lab; install it with: {_INSTALL}")
            continue
        try:
            loaded = brought[name].load()
        except ImportError as error:
            hint = f"can't be loaded from {brought[name].value}: {error}"
            _add_hint(places[place], name, hint)
            continue
        if isinstance(loaded, typer.Typer):
            places[place].add_typer(loaded, name=command)
        else:
            places[place].command(command)(loaded)


def _add_hint(app: typer.Typer, name: str, hint: str) -> None:
    """Add a command that can't run: it says why, whatever follows its name."""

    def missing() -> None:
        raise OptionError(f"midfill {name.replace('.', ' ')} {hint}")

    app.command(
        name.rpartition(".")[2],
        help=f"{_LAB[name]} Needs midfill-lab." if name in _LAB else hint,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
    )(missing)
