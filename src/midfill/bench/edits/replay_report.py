"""A replayed editing session's figures as a table."""

from collections.abc import Mapping

from midfill.bench.edits.replay import ReplayResult
from midfill.reporting.result_table import ResultTable
from midfill.system.machine import describe_machine


def replay_table(results: Mapping[str, ReplayResult], model: str) -> ResultTable:
    """A row for each layout."""
    requests = next(iter(results.values())).requests
    return ResultTable(
        title="An editing session, replayed",
        rows=[_cells(layout, result) for layout, result in results.items()],
        caption=f"{model}, {requests} requests of one editing session, one after the other; "
        f"TTFT is the median; {describe_machine()}.",
    )


def _cells(layout: str, result: ReplayResult) -> dict[str, str]:
    return {
        "layout": layout,
        "prompt tokens": f"{result.prompt_tokens:,}",
        "computed": f"{result.computed_tokens:,}",
        "TTFT ms": f"{result.ttft_seconds * 1000:.1f}",
        "p90 ms": f"{result.ttft_p90_seconds * 1000:.1f}",
        "wall s": f"{result.wall_seconds:.1f}",
    }
