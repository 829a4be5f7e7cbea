"""Prefill and decode speed as a table and as Markdown."""

from rich.table import Table

from midfill.bench.speed import Rate, SpeedReport

_COLUMNS = ("measured", "tokens/s", "slowest", "fastest")


def _rows(report: SpeedReport) -> list[list[str]]:
    def row(what: str, rate: Rate) -> list[str]:
        return [
            what,
            f"{rate.tokens_per_second:.0f}",
            f"{rate.slowest:.0f}",
            f"{rate.fastest:.0f}",
        ]

    return [
        *(row(f"prefill of {length} tokens", rate) for length, rate in report.prefill.items()),
        *(row(f"decode at {length} tokens", rate) for length, rate in report.decode.items()),
    ]


def _caption(report: SpeedReport) -> str:
    engine = report.engine
    return (
        f"{report.model}, one request at a time, without speculation, "
        f"median of {report.options.repeats} runs; "
        f"{engine.backend}, weights {engine.weight_bytes / 1e6:.1f} MB, KV pool "
        f"{engine.kv_bytes / 1e9:.2f} GB ({engine.slots} tokens), loaded in "
        f"{engine.load_seconds:.1f} s; {report.machine}"
    )


def speed_table(report: SpeedReport) -> Table:
    """For the terminal."""
    table = Table(title="Prefill and decode", caption=_caption(report))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "measured" else "right")
    for row in _rows(report):
        table.add_row(*row)
    return table


def speed_markdown(report: SpeedReport) -> str:
    """For docs/benchmarks.md."""
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
        *("| " + " | ".join(row) + " |" for row in _rows(report)),
        "",
        _caption(report) + ".",
    ]
    return "\n".join(lines)
