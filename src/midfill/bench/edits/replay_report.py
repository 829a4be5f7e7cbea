"""A replayed editing session's figures as a table and as Markdown."""

from collections.abc import Mapping

from rich.table import Table

from midfill.bench.edits.replay import ReplayResult
from midfill.bench.machine import describe_machine

_COLUMNS = ("layout", "prompt tokens", "computed", "TTFT ms", "p90 ms", "wall s")


def _rows(results: Mapping[str, ReplayResult]) -> list[list[str]]:
    return [
        [
            name,
            f"{result.prompt_tokens:,}",
            f"{result.computed_tokens:,}",
            f"{result.ttft_seconds * 1000:.1f}",
            f"{result.ttft_p90_seconds * 1000:.1f}",
            f"{result.wall_seconds:.1f}",
        ]
        for name, result in results.items()
    ]


def _caption(results: Mapping[str, ReplayResult], model: str) -> str:
    requests = next(iter(results.values())).requests
    return (
        f"{model}, {requests} requests of one editing session, one after the other; "
        f"TTFT is the median; {describe_machine()}"
    )


def replay_table(results: Mapping[str, ReplayResult], model: str) -> Table:
    """For the terminal."""
    table = Table(title="An editing session, replayed", caption=_caption(results, model))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in _rows(results):
        table.add_row(*row)
    return table


def replay_markdown(results: Mapping[str, ReplayResult], model: str) -> str:
    """For docs/benchmarks.md."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *_rows(results)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", f"{_caption(results, model)}."])
