"""``midfill methods``: the published methods that a server can use, and their calibration."""

from typing import Annotated

import typer

from midfill.cli.options import AdapterOption, ModelOption
from midfill.cli.values import parse_calibration

app = typer.Typer(
    invoke_without_command=True,
    help="List the published methods, or compute what they need to know of a model.",
)

SpecificationArgument = Annotated[
    str,
    typer.Argument(
        parser=parse_calibration,
        metavar="NAME[:OPTION=VALUE,...]",
        help="The method, and settings of its calibration.",
    ),
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Begin anew, whatever has been computed before.")
]


@app.callback()
def methods(context: typer.Context) -> None:
    """List the methods: name, kind, source and options with their defaults."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from midfill.lab.calibration.registry import CALIBRATORS
    from midfill.methods.registry import KINDS, METHODS

    table = Table(box=None, pad_edge=False)
    for title in ("NAME", "KIND", "OPTIONS", "SOURCE"):
        table.add_column(title, overflow="fold")
    for entry in METHODS.values():
        options = " ".join(
            f"{name}={value}" if isinstance(value, str) else f"{name}={value:g}"
            for name, value in entry.options().items()
        )
        table.add_row(entry.name, entry.kind, options, f"{entry.title}: {entry.source}")
    Console().print(table, highlight=False)
    calibrated = ", ".join(CALIBRATORS)
    typer.echo()
    for kind, meaning in KINDS.items():
        typer.echo(f"{kind:8} {meaning}")
    typer.echo("\nmidfill serve --method cake:budget=256 uses one for every prompt.")
    typer.echo("A budget is tokens per layer, or a share of the prompt if below 1.")
    typer.echo(f"For other models than the default one, calibrate these first: {calibrated}.")
    typer.echo("midfill methods calibrate NAME --model MODEL")


@app.command()
def calibrate(
    method: SpecificationArgument,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    again: AgainOption = False,
) -> None:
    """Compute what a method needs to know of a model, and keep it in the cache folder.

    It is done once per model and adapter. An interrupted calibration continues where it was.
    """
    from midfill.cli.progress import show_progress
    from midfill.lab.calibration.calibrate import calibrate as run
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
    from midfill.models.checkpoints.opening import open_model

    name = model or DEFAULT_MODEL
    with show_progress() as progress:
        checkpoint = open_model(resolve(name, progress), resolve_adapter(name, adapter))
        path = run(method, checkpoint, progress, again=again)
    typer.echo(f"{path}\nmidfill serve --method {method.partition(':')[0]} uses it")
