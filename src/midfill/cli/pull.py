"""``midfill pull`` and ``midfill models``: download models, and list them."""

from typing import Annotated

import typer


def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="ORG/NAME on the Hugging Face hub, or a name that 'midfill models' lists; by"
            " default the default model.",
        ),
    ] = None,
) -> None:
    """Download a model; an interrupted download continues where it stopped."""
    from midfill.cli.progress import show_progress
    from midfill.models.checkpoints import model_store

    with show_progress() as progress:
        path = model_store.pull(model or model_store.DEFAULT_MODEL, progress)
    typer.echo(path)


def models() -> None:
    """List the models that can be served by name, and models for code with their speed here.

    Other models of the same families are served from a path or the hub.
    Every family is tested with tiny random checkpoints against transformers,
    llama with real weights (SmolLM2-135M), too.
    """
    from rich.console import Console
    from rich.table import Table

    from midfill.cli.code_models import code_models
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, list_models
    from midfill.models.families import FAMILIES
    from midfill.system.bandwidth import memory_bandwidth
    from midfill.system.machine import available_memory, format_size

    table = Table(box=None, pad_edge=False)
    for title in ("NAME", "SIZE", "FORMAT", "STATE", "WHERE"):
        table.add_column(title, overflow="fold", justify="right" if title == "SIZE" else "left")
    for entry in list_models():
        name = f"{entry.name} (default)" if entry.name == DEFAULT_MODEL else entry.name
        where = str(entry.path) if entry.state == "ready" else ""
        table.add_row(name, format_size(entry.bytes), entry.format, entry.state, where)
    Console().print(table)
    Console().print(f"Families: {', '.join(sorted(FAMILIES))}", highlight=False)
    bandwidth = memory_bandwidth(anew=True)
    lines = list(code_models(bandwidth, available_memory()))
    if lines:
        typer.echo(
            f"\nModels for code that fit into this machine, and what its memory"
            f" ({bandwidth / 1e9:.0f} GB/s) allows at most:"
        )
    for line in lines:
        typer.echo(f"  {line}")
