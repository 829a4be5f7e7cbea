"""What a comparison of two versions reports: how many times as fast the new one is, and how surely.

The ratio of a figure is the median over pairs. Its 95% interval is the sign test's: two of the
pairs' own ratios, counted in from both ends, such that the true median lies between them with a
probability of at least 95% whatever the ratios' distribution. (A bootstrap of medians, tried on
6 to 24 simulated pairs, held the true median in 93% of the cases.)
"""

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import Literal

import msgspec

from benchmarks.compare.copies import Version
from midfill.system.machine import Machine
from midfill_lab.reporting import ResultTable

MIN_PAIRS = 6
"""Five pairs lie all on one side of the median in 2 of 32 cases, six in 2 of 64: under 5%."""

_TAIL = 0.025
"""Largest probability that the true median lies beyond one end of the interval."""
_PAIRS = {"speed": "restarts of both versions", "rounds": "interleaved pairs of runs"}


class RatioFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of both versions.

    Attributes:
        name: such as "decode at 16 tokens".
        unit: of ``old`` and ``new``; "tokens/s" and "requests/s" are rates, "ms" is a time.
        old, new: the figure of every pair, in order.
        ratios: how many times as fast the new version was in each pair.
        ratio: their median.
        low, high: 95% interval of ``ratio``.
    """

    name: str
    unit: str
    old: list[float]
    new: list[float]
    ratios: list[float]
    ratio: float
    low: float
    high: float


class VersionsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one comparison measured.

    Attributes:
        benchmark: "speed" or "rounds".
        arguments: of the benchmark, for both versions.
        pairs: how many.
    """

    benchmark: Literal["speed", "rounds"]
    arguments: list[str]
    machine: Machine
    old: Version
    new: Version
    pairs: int
    figures: list[RatioFigure]


def ratio_figure(
    name: str, unit: str, old: Sequence[float], new: Sequence[float], ratios: Sequence[float]
) -> RatioFigure:
    """Return a figure with the median of its ratios and their interval; see ``RatioFigure``."""
    ratio, low, high = estimate_ratio(ratios)
    return RatioFigure(
        name=name,
        unit=unit,
        old=list(old),
        new=list(new),
        ratios=list(ratios),
        ratio=ratio,
        low=low,
        high=high,
    )


def estimate_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the pairs' ratios and the ends of its 95% interval.

    Args:
        ratios: at least ``MIN_PAIRS``.
    """
    ordered = sorted(ratios)
    count = len(ordered)
    place, below = 0, 2.0**-count  # of the lower end; that the median lies below it
    while (more := below + comb(count, place + 1) * 2.0**-count) <= _TAIL:
        place, below = place + 1, more
    return median(ordered), ordered[place], ordered[count - 1 - place]


def check_pairs(pairs: int) -> None:
    """Refuse too few pairs.

    Raises:
        ValueError: fewer than ``MIN_PAIRS``.
    """
    if pairs < MIN_PAIRS:
        raise ValueError(f"{pairs} pairs give no 95% interval, {MIN_PAIRS} do")


def versions_table(report: VersionsReport) -> ResultTable:
    """A row per figure."""
    return ResultTable(
        title=f"{report.benchmark}: this tree and {report.old}",
        rows=[
            {
                "figure": figure.name,
                "unit": figure.unit,
                "old": f"{median(figure.old):.4g}",
                "new": f"{median(figure.new):.4g}",
                "times as fast": f"{figure.ratio:.3f}",
                "95% interval": f"{figure.low:.3f} to {figure.high:.3f}",
            }
            for figure in report.figures
        ],
        labels=2,
        caption=f"Old: {report.old}; new: {report.new}. compare {report.benchmark} "
        f"{' '.join(report.arguments)}; {report.pairs} {_PAIRS[report.benchmark]}. Times as fast: "
        "the median over them, above 1 the new version is faster; its interval is the sign "
        f"test's. {report.machine}.",
    )
