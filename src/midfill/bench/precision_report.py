"""What rounding costs, as a table and as Markdown."""

from rich.table import Table

from midfill.bench.precision import PrecisionReport

_COLUMNS = ("weights", "KV", "KL mean", "KL median", "KL p99", "same top token", "perplexity")


def _rows(report: PrecisionReport) -> list[list[str]]:
    rows = [["f32", "f32", "0", "0", "0", "100%", f"{report.perplexity:.3f}"]]
    for each in report.variants:
        served = " (served)" if each.variant.weights == each.variant.kv == "auto" else ""
        rows.append(
            [
                each.weights.lower() + served,
                each.kv,
                f"{each.mean:.5f}",
                f"{each.median:.5f}",
                f"{each.p99:.5f}",
                f"{each.agreement:.1%}",
                f"{each.perplexity:.3f}",
            ]
        )
    return rows


def _caption(report: PrecisionReport) -> str:
    return (
        f"{report.model}, layers stored as {report.stored.lower()}, {report.tokens:,} tokens of "
        f"standard library files, at most {report.window:,} of each; KL in nats a token, from the "
        "float32 kernels with the same weights; rows that meet q4 or q8 are rounded to int8"
    )


def precision_table(report: PrecisionReport) -> Table:
    """For the terminal."""
    table = Table(title="What rounding costs", caption=_caption(report))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("weights", "KV") else "right")
    for row in _rows(report):
        table.add_row(*row)
    return table


def precision_markdown(report: PrecisionReport) -> str:
    """For docs/benchmarks.md."""
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
        *("| " + " | ".join(row) + " |" for row in _rows(report)),
        "",
        _caption(report) + ".",
    ]
    return "\n".join(lines)
