"""Where a step's time goes, as tables and as Markdown."""

from rich.box import SIMPLE_HEAD
from rich.console import Group

from midfill.bench.profile import LoadProfile, Part, ProfileReport
from midfill.reporting.result_table import ResultTable


def profile_tables(report: ProfileReport) -> Group:
    """For the terminal."""
    drawn = []
    for results in map(_table, report.loads):
        table = results.drawn(title_justify="left", box=SIMPLE_HEAD)
        for column in table.columns:
            column.no_wrap = True
        table.rows[-2].end_section = True  # the last row sums up the others
        drawn.append(table)
    return Group(*drawn, _caption(report))


def profile_markdown(report: ProfileReport) -> str:
    """For docs/benchmarks.md."""
    parts = []
    for results in map(_table, report.loads):
        parts += [f"**{results.title}**", results.markdown(numbers="---:")]
    return "\n\n".join([*parts, _caption(report)])


def _table(profile: LoadProfile) -> ResultTable:
    tokens = profile.load.streams * profile.load.rows / profile.seconds
    total = Part(
        name="all",
        seconds=profile.seconds,
        bytes_least=sum(part.bytes_least for part in profile.parts),
        operations_least=sum(part.operations_least for part in profile.parts),
        seconds_least=sum(part.seconds_least for part in profile.parts),
    )
    return ResultTable(
        title=f"{profile.load.name}: {tokens:,.0f} tokens/s",
        rows=[_cells(part, profile.seconds) for part in (*profile.parts, total)],
    )


def _cells(part: Part, whole: float) -> dict[str, str]:
    bound = part.seconds_least > 0.0
    return {
        "part": part.name,
        "ms": f"{part.seconds * 1e3:.3f}",
        "share": f"{part.seconds / whole:.0%}",
        "MB": f"{part.bytes_least / 1e6:.1f}" if bound else "",
        "MFLOP": f"{part.operations_least / 1e6:,.0f}" if bound else "",
        "least ms": f"{part.seconds_least * 1e3:.3f}" if bound else "",
        "reached": f"{part.seconds_least / part.seconds:.0%}" if bound and part.seconds else "",
    }


def _caption(report: ProfileReport) -> str:
    ceilings = report.roofline
    return (
        f"{report.model}, {report.engine.backend}, without speculation; ceilings measured in the "
        f"same call: {ceilings.bytes_per_second / 1e9:.1f} GB/s from memory, "
        f"{ceilings.int8_per_second / 1e9:,.0f} GOP/s on int8, "
        f"{ceilings.float32_per_second / 1e9:,.0f} GFLOP/s on float32; {report.machine}."
    )
