"""The command ``python -m benchmarks blocks``."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import WindowOption
from midfill.cli.outputs import DocsOption
from midfill.system.reporting.publish import publish

RoundsOption = Annotated[int, typer.Option(min=2, help="Requests of the session.")]
SeedOption = Annotated[int, typer.Option(help="Of all random choices.")]


def blocks(
    rounds: RoundsOption = 600,
    window: WindowOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Count what an editing session computes with caches of whole blocks, without a model."""
    from midfill.infill.window import DEFAULT_WINDOW, WindowRule
    from midfill.lab.bench.edits.blocks import blocks_table, measure_blocks
    from midfill.lab.bench.edits.measure import mixed_session

    rule = DEFAULT_WINDOW if window is None else WindowRule(*window)
    costs = measure_blocks(mixed_session("mix", rounds, seed), rule)
    table = blocks_table(costs, rounds, rule)
    publish(costs, table.drawn(), table.markdown(), section="blocks", json=json, docs=docs)
