"""Ratios with their intervals, and the table of them."""

import pytest

from benchmarks.compare.copies import Version
from benchmarks.compare.ratios import (
    VersionsReport,
    check_pairs,
    estimate_ratio,
    ratio_figure,
    versions_table,
)
from midfill.system.machine import describe_machine


def test_the_interval_is_the_sign_tests() -> None:
    # Of 6 pairs the whole range, of 12 the third from each end: P(at most 2 of 12 heads) = 1.9%;
    # of 15 the fourth: P(at most 3 of 15 heads) = 1.8%.
    assert estimate_ratio([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (3.5, 1.0, 6.0)
    assert estimate_ratio([float(n) for n in range(12, 0, -1)]) == (6.5, 3.0, 10.0)
    assert estimate_ratio([float(n) for n in range(15, 0, -1)]) == (8.0, 4.0, 12.0)


def test_too_few_pairs_are_refused() -> None:
    check_pairs(6)
    with pytest.raises(ValueError, match="5 pairs give no 95% interval, 6 do"):
        check_pairs(5)


def test_a_table_shows_medians_and_the_ratio_of_pairs() -> None:
    # The ratio of medians would be 1: what counts are the pairs.
    old, new = [100.0, 200.0, 300.0] * 2, [200.0, 300.0, 150.0] * 2
    ratios = [now / was for was, now in zip(old, new, strict=True)]
    report = VersionsReport(
        benchmark="speed",
        arguments=["m", "--threads", "1"],
        machine=describe_machine(),
        old=Version(commit="a" * 40),
        new=Version(commit="b" * 40, modified=True),
        pairs=6,
        figures=[ratio_figure("decode at 16 tokens", "tokens/s", old, new, ratios)],
    )
    text = versions_table(report).markdown()
    assert "| decode at 16 tokens | tokens/s | 200 | 200 | 1.500 | 0.500 to 2.000 |" in text
    assert "Old: aaaaaaaaaa; new: bbbbbbbbbb with changes. compare speed m --thr" in text
    assert "6 restarts of both versions" in text
