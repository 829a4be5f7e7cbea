"""python -m benchmarks train-plan: a training in stages, as the default model's adapter had."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer


def train_plan(
    plan: Annotated[Path, typer.Argument(help="TOML file with stages; see docs/training.md.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for packages, stages and the adapter.")
    ],
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train in the stages of a plan; the same command continues an interrupted run.

    Fetches the packages that the plan names, trains stage after stage, and writes an adapter with
    a record of all of them.
    """
    from rich.console import Console

    from midfill.cli.progress import show_progress
    from midfill_lab.cli.training import open_base, public_name, require_training, train_and_finish

    require_training()
    import torch

    from benchmarks.training.plan import join_stages, prepare_stages, read_plan

    if threads is not None:
        torch.set_num_threads(threads)
    chosen = read_plan(plan)
    checkpoint = open_base(chosen.model)
    console = Console(stderr=True, highlight=False)
    with show_progress() as progress:
        stages = prepare_stages(
            chosen,
            checkpoint,
            output,
            base_name=public_name(chosen.model),
            progress=progress,
        )
        first = next(stages, None)
    for name, run in chain([] if first is None else [first], stages):
        console.print(f"stage {name}")
        train_and_finish(console, run)
    console.print(f"adapter: {join_stages(chosen, output)}", soft_wrap=True)
