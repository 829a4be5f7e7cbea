"""The command ``midfill eval page``."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.evaluation.options import HumanEvalOption, ProcessesOption
from midfill.cli.options import AdapterOption, BackendOption, DeviceOption, ThreadsOption

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN.toml", help="The page's runs and sections.")
]
HeldOutOption = Annotated[
    Path | None,
    typer.Option(
        "--files", metavar="FOLDER", help="Held-out files, fetched by 'midfill eval files FOLDER'."
    ),
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


def page(
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
    from midfill.cli.progress import show_progress
    from midfill.errors import OptionError
    from midfill.lab.evaluation.models import ModelChoice
    from midfill.lab.evaluation.page import PageOptions, measure_page, read_page

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
