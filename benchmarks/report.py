"""Tables of benchmarks: printed, and written into the documents that show them."""

from collections.abc import Sequence
from pathlib import Path

from midfill_lab.evaluation.summary import estimate_difference
from midfill_lab.reporting import ResultTable, markdown, publish_tables

__all__ = ["difference_cell", "markdown", "publish"]


def publish(
    report: object, *tables: ResultTable, section: str, json: Path | None, docs: Path | None
) -> None:
    """Print tables; see ``reporting.publish_tables`` for the arguments."""
    publish_tables(report, tables, json=json, docs=docs, section=section)


def difference_cell(
    first: Sequence[float],
    second: Sequence[float],
    groups: Sequence[str],
    *,
    digits: int,
    scale: float = 1.0,
) -> str:
    """Return the mean of ``second`` minus ``first`` with its 95% interval, see ``summary``.

    Args:
        first, second: values at one index are of the same prompt.
        groups: of each prompt; those of one group are not independent.
        digits: after the point.
        scale: what values are multiplied by, such as 100 for points.
    """
    found = estimate_difference(first, second, groups)
    value, low, high = (
        f"{scale * each:+.{digits}f}" for each in (found.value, found.low, found.high)
    )
    return f"{value} [{low}, {high}]"
