"""Where a step's time goes, as tables and as Markdown."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from midfill.bench.profile import LoadProfile, Part, ProfileReport

_COLUMNS = ("ms", "share", "MB", "MFLOP", "least ms", "reached")


def _cells(part: Part, whole: float) -> list[str]:
    bound = part.seconds_least > 0.0
    return [
        f"{part.seconds * 1e3:.3f}",
        f"{part.seconds / whole:.0%}",
        f"{part.bytes_least / 1e6:.1f}" if bound else "",
        f"{part.operations_least / 1e6:,.0f}" if bound else "",
        f"{part.seconds_least * 1e3:.3f}" if bound else "",
        f"{part.seconds_least / part.seconds:.0%}" if bound and part.seconds else "",
    ]


def _rows(profile: LoadProfile) -> list[list[str]]:
    total = Part(
        name="all",
        seconds=profile.seconds,
        bytes_least=sum(part.bytes_least for part in profile.parts),
        operations_least=sum(part.operations_least for part in profile.parts),
        seconds_least=sum(part.seconds_least for part in profile.parts),
    )
    return [[part.name, *_cells(part, profile.seconds)] for part in (*profile.parts, total)]


def _title(profile: LoadProfile) -> str:
    tokens = profile.load.streams * profile.load.rows / profile.seconds
    return f"{profile.load.name}: {tokens:,.0f} tokens/s"


def _caption(report: ProfileReport) -> str:
    ceilings = report.roofline
    return (
        f"{report.model}, {report.engine.backend}, without speculation; ceilings measured in the "
        f"same call: {ceilings.bytes_per_second / 1e9:.1f} GB/s from memory, "
        f"{ceilings.int8_per_second / 1e9:,.0f} GOP/s on int8, "
        f"{ceilings.float32_per_second / 1e9:,.0f} GFLOP/s on float32; {report.machine}"
    )


def profile_tables(report: ProfileReport) -> Group:
    """For the terminal."""
    tables = []
    for profile in report.loads:
        table = Table(title=_title(profile), title_justify="left", box=SIMPLE_HEAD)
        table.add_column("part", no_wrap=True)
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        *rows, total = _rows(profile)
        for row in rows:
            table.add_row(*row)
        table.add_section()
        table.add_row(*total)
        tables.append(table)
    return Group(*tables, _caption(report))


def profile_markdown(report: ProfileReport) -> str:
    """For docs/benchmarks.md."""
    lines = []
    for profile in report.loads:
        lines += [
            f"**{_title(profile)}**",
            "",
            "| part | " + " | ".join(_COLUMNS) + " |",
            "| --- |" + " ---: |" * len(_COLUMNS),
            *("| " + " | ".join(row) + " |" for row in _rows(profile)),
            "",
        ]
    return "\n".join([*lines, _caption(report) + "."])
