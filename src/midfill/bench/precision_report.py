"""What rounding costs, as a table."""

from midfill.bench.precision import Divergence, PrecisionReport
from midfill.reporting.result_table import ResultTable


def precision_table(report: PrecisionReport) -> ResultTable:
    """A row for each way to keep weights and KV."""
    exact = {
        "weights": "f32",
        "KV": "f32",
        "KL mean": "0",
        "KL median": "0",
        "KL p99": "0",
        "same top token": "100%",
        "perplexity": f"{report.perplexity:.3f}",
    }
    return ResultTable(
        title="What rounding costs",
        rows=[exact, *map(_cells, report.variants)],
        labels=2,
        caption=f"{report.model}, layers stored as {report.stored.lower()}, {report.tokens:,} "
        f"tokens of standard library files, at most {report.window:,} of each; KL in nats a token, "
        "from the float32 kernels with the same weights; rows that meet q4 or q8 are rounded to "
        "int8.",
    )


def _cells(result: Divergence) -> dict[str, str]:
    served = " (served)" if result.variant.weights == result.variant.kv == "auto" else ""
    return {
        "weights": result.weights.lower() + served,
        "KV": result.kv,
        "KL mean": f"{result.mean:.5f}",
        "KL median": f"{result.median:.5f}",
        "KL p99": f"{result.p99:.5f}",
        "same top token": f"{result.agreement:.1%}",
        "perplexity": f"{result.perplexity:.3f}",
    }
