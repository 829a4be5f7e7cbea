"""python -m benchmarks evaluation-page and held-out: the measurements of docs/evaluation.md."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.options import AdapterOption, BackendOption, DeviceOption, ThreadsOption
from midfill_lab.cli.evaluation.options import HumanEvalOption, ProcessesOption

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN.toml", help="The page's runs and sections.")
]
HeldOutOption = Annotated[
    Path | None,
    typer.Option("--files", metavar="FOLDER", help="Held-out files, fetched by 'held-out FOLDER'."),
]
ResultsOption = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Where the runs' JSON files are; what they hold is not measured again.",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="SECTION", help="Measure this section alone; repeatable."),
]
PageLimitOption = Annotated[
    int | None,
    typer.Option(min=0, help="Maximum holes per kind in every run, instead of the plan's."),
]


def evaluation_page(
    plan: PlanArgument,
    humaneval: HumanEvalOption = None,
    files: HeldOutOption = None,
    results: ResultsOption = Path("evaluation-results"),
    only: OnlyOption = None,
    limit: PageLimitOption = None,
    adapter: AdapterOption = None,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    processes: ProcessesOption = 1,
) -> None:
    """Measure a whole page: run everything its plan names, and write its sections.

    An interrupted page continues where it stopped.
    """
    from benchmarks.evaluation.page import PageOptions, measure_page, read_page
    from midfill.cli.progress import show_progress
    from midfill.errors import OptionError
    from midfill_lab.evaluation.models import ModelChoice

    found = read_page(plan)
    sections = only or list(found.sections)
    unknown = [name for name in sections if name not in found.sections]
    if unknown:
        raise OptionError(
            f"--only names {', '.join(unknown)}; {plan} has {', '.join(found.sections)}"
        )
    options = PageOptions(
        humaneval=humaneval,
        held_out=files,
        results=results,
        limit=limit,
        choice=ModelChoice(
            adapter=adapter, backend=backend, device=device, threads=threads, processes=processes
        ),
    )
    document = plan.parent / found.page
    with show_progress() as progress:
        measure_page(
            found,
            document,
            options,
            sections,
            progress,
            lambda name: typer.echo(f"{document}: section {name} written"),
        )


def held_out(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Gets a folder for each language.")
    ],
) -> None:
    """Fetch held-out files: pinned packages that no adapter of midfill was trained on."""
    from benchmarks.evaluation.held_out import SUFFIXES, fetch_held_out
    from midfill.cli.progress import show_progress

    with show_progress() as progress:
        fetch_held_out(folder, progress)
    typer.echo("use them with:")
    for language, suffixes in SUFFIXES.items():
        typer.echo(
            f"  midfill eval infilling --files {folder / language} --suffixes {','.join(suffixes)}"
        )
