"""Tables and plots of what ``midfill bench`` has written as JSON, for the documents."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.plots import plot_methods, plot_peers, plot_rounds
from benchmarks.report import markdown
from midfill.errors import MidfillError, OptionError
from midfill_lab.bench.ceiling.plot import plot_ceiling
from midfill_lab.bench.ceiling.report import ceiling_tables
from midfill_lab.bench.ceiling.results import CeilingReport
from midfill_lab.bench.edits import EditsReport, edits_table
from midfill_lab.bench.methods.report import methods_tables
from midfill_lab.bench.methods.results import MethodsReport
from midfill_lab.bench.peers.results import PeersReport, peers_notes, peers_tables
from midfill_lab.bench.profile import ProfileReport, profile_tables
from midfill_lab.bench.rounds import RoundsReport, rounds_table
from midfill_lab.bench.serving.plot import plot_serving
from midfill_lab.bench.serving.report import ServingReport, serving_tables
from midfill_lab.bench.speed import SpeedReport, speed_table
from midfill_lab.cli.outputs import DocsOption, PlotOption
from midfill_lab.reporting import ResultTable, replace_section


def _peers_tables(report: PeersReport) -> list[ResultTable]:
    """Return the tables; the last one's caption ends with what was not measured."""
    *tables, servers = peers_tables(report)
    notes = "".join(f"\n{note.replace(chr(10), ' / ')}." for note in peers_notes(report))
    return [*tables, replace(servers, caption=f"{servers.caption}{notes}")]


@dataclass(frozen=True)
class _Kind:
    """What a command of ``midfill bench`` writes.

    Attributes:
        report: the type of its figures.
        tables: the tables of a report.
        plot: draws a report into a file; None if there is no such plot.
    """

    report: type[msgspec.Struct]
    tables: Callable[[Any], list[ResultTable]]
    plot: Callable[[Any, Path], None] | None = None


KINDS = {
    "ceiling": _Kind(CeilingReport, ceiling_tables, plot_ceiling),
    "edits": _Kind(EditsReport, lambda report: [edits_table(report)]),
    "methods": _Kind(MethodsReport, methods_tables, plot_methods),
    "peers": _Kind(PeersReport, _peers_tables, plot_peers),
    "profile": _Kind(ProfileReport, profile_tables),
    "rounds": _Kind(RoundsReport, lambda report: [rounds_table(report)], plot_rounds),
    "serving": _Kind(ServingReport, serving_tables, plot_serving),
    "speed": _Kind(SpeedReport, lambda report: [speed_table(report)]),
}

KindArgument = Annotated[
    str, typer.Argument(metavar="NAME", help=f"The command: {', '.join(KINDS)}.")
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="What it wrote with --json.", dir_okay=False)
]
SectionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The section for them, between <!-- NAME --> and <!-- /NAME -->; the command's name if"
        " not set.",
    ),
]


def tables(
    name: KindArgument,
    file: FileArgument,
    docs: DocsOption = None,
    section: SectionOption = None,
    plot: PlotOption = None,
) -> None:
    """Print as Markdown what a command of 'midfill bench' has written, or write it into a page."""
    if (kind := KINDS.get(name)) is None:
        raise OptionError(f"there is no {name}; there are {', '.join(KINDS)}")
    if plot is not None and kind.plot is None:
        raise OptionError(f"--plot: there is no plot of {name}")
    report = _read(file, name, kind)
    text = markdown(kind.tables(report))
    if docs is None:
        typer.echo(text)
    else:
        replace_section(docs, section or name, text)
    if plot is not None and kind.plot is not None:
        kind.plot(report, plot)


def _read(file: Path, name: str, kind: _Kind) -> msgspec.Struct:
    """Read a command's figures.

    Raises:
        MidfillError: the file can't be read, or holds none.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind.report)
    except OSError as error:
        raise MidfillError(f"{file} can't be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MidfillError(f"{file} is no file of 'midfill bench {name}': {error}") from None
