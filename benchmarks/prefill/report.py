"""The table of a run of ``bench prefill``."""

from statistics import median

from benchmarks.prefill.results import PrefillReport, PrefillResult
from midfill.system.reporting.result_table import ResultTable

_NOTHING = "-"


def prefill_table(report: PrefillReport) -> ResultTable:
    """Return the table: dense attention, methods, and baselines of equal cost."""
    options, prompts = report.options, len(report.options.depths)
    return ResultTable(
        title=f"Sparse prefill: {report.model}",
        rows=[_cells(result) for result in report.results],
        caption=f"{report.model}, {report.backend}; prompts of {report.tokens:,} tokens of"
        f" {report.text}, each with a needle. Products: of queries and keys, counted, beside those"
        " of dense attention in all layers that attend to everything; of heads: the least and the"
        " most of any head. Attention: processor time beyond that of a prefill whose rows attend"
        " to their own block of 64 keys, with what it takes to choose keys; in brackets, how many"
        f" times as fast as dense, median of {options.repeats} runs in turn. Needle: mean"
        f" log-probability of its tokens in {prompts} prompts, and how many a greedy answer"
        f" finds; KL: of the {options.scored} tokens before the answer and of the answer, in nats"
        " per token from dense attention. Baselines compute as many products as the method beside"
        " them: the first keys and a window; columns and diagonals at random."
        f" {report.machine}; load {report.load:.1f} before the run.",
    )


def _cells(result: PrefillResult) -> dict[str, str]:
    by_head = [pairs for layer in result.pairs for pairs in layer]
    shares = [pairs / result.causal for pairs in by_head] if result.causal else []
    return {
        "method": result.name,
        "products": f"{sum(shares) / len(shares):.1%}" if shares else "100%",
        "of heads": f"{min(shares):.0%} to {max(shares):.0%}" if shares else _NOTHING,
        "attention s": _attention(result),
        "prefill s": _prefill(result),
        "needle": f"{result.logprob:.3f}, {result.likeliest:.0%}",
        "KL": f"{result.divergence:.4f}",
    }


def _attention(result: PrefillResult) -> str:
    if not result.seconds:
        return _NOTHING
    own = [a - rest for a, rest in zip(result.seconds, result.rest_seconds, strict=True)]
    dense = [a - rest for a, rest in zip(result.dense_seconds, result.rest_seconds, strict=True)]
    times = median(d / o for d, o in zip(dense, own, strict=True))
    return f"{median(own):.1f} ({times:.2f}x)"


def _prefill(result: PrefillResult) -> str:
    if not result.seconds:
        return _NOTHING
    pairs = zip(result.dense_seconds, result.seconds, strict=True)
    times = median(dense / own for dense, own in pairs)
    return f"{median(result.seconds):.1f} ({times:.2f}x)"
