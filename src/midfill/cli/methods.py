"""midfill methods: the published methods that a server can use."""

import typer


def methods() -> None:
    """List the methods: name, kind, source and options with their defaults."""
    from rich.console import Console
    from rich.table import Table

    from midfill.methods.registry import METHODS

    table = Table(box=None, pad_edge=False)
    for title in ("NAME", "KIND", "OPTIONS", "SOURCE"):
        table.add_column(title, overflow="fold")
    for entry in METHODS.values():
        options = " ".join(f"{name}={value:g}" for name, value in entry.options().items())
        table.add_row(entry.name, entry.kind, options, f"{entry.title}: {entry.source}")
    Console().print(table, highlight=False)
    typer.echo("\nmidfill serve --method cake:budget=256 compresses the KV of every prompt.")
    typer.echo("A budget is tokens per layer, or a share of the prompt if below 1.")
