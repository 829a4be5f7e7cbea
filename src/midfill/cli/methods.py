"""``midfill methods``: the published methods that a server can use."""

import typer

app = typer.Typer(invoke_without_command=True, help="List the published methods.")


@app.callback()
def methods(context: typer.Context) -> None:
    """List the methods: name, kind, source and options with their defaults."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

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
    calibrated = ", ".join(
        f"{entry.name} ({entry.calibrated_where})" if entry.calibrated_where else entry.name
        for entry in METHODS.values()
        if entry.calibrated
    )
    typer.echo()
    for kind, meaning in KINDS.items():
        typer.echo(f"{kind:8} {meaning}")
    typer.echo("\nmidfill serve --method cake:budget=256 uses one for every prompt.")
    typer.echo("A budget is tokens per layer, or a share of the prompt if below 1.")
    typer.echo(f"For other models than the default one, calibrate these first: {calibrated}.")
    typer.echo("midfill methods calibrate NAME --model MODEL")
