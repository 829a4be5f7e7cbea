"""Rates, ratios and percentiles are of what is new."""

from math import inf

import pytest

from midfill.serving.top.history import History
from midfill.serving.top.snapshot import Snapshot

HISTOGRAM = "time_to_first_token_seconds"


def history(*snapshots: Snapshot, span: float = 10.0) -> History:
    made = History(span)
    for snapshot in snapshots:
        made.add(snapshot)
    return made


def counted(time: float, **counters: float) -> Snapshot:
    return Snapshot(time, values={(name, ""): value for name, value in counters.items()})


def observed(time: float, *counts: float) -> Snapshot:
    bounds = dict(zip((0.1, 0.25, inf), counts, strict=True))
    return Snapshot(time, buckets={(HISTOGRAM, "a"): bounds})


def test_a_rate_needs_two_snapshots() -> None:
    assert history(counted(0, a=5)).rate("a") is None
    assert history(counted(0, a=5), counted(2, a=9)).rate("a") == 2


def test_a_counter_that_begins_again_has_grown_by_what_it_is() -> None:
    assert history(counted(0, a=50), counted(1, a=60), counted(2, a=4)).rate("a") == 7


def test_what_is_older_than_the_span_is_forgotten() -> None:
    snapshots = [counted(0, a=0), counted(9, a=900), counted(12, a=903)]
    assert history(*snapshots, span=5).rate("a") == 1
    assert history(counted(0, a=0), counted(100, a=200), span=5).rate("a") == 2


def test_ratios() -> None:
    before, after = counted(0, part=1, whole=10), counted(1, part=4, whole=14)
    assert history(before, after).ratio("part", "whole") == 0.75
    assert history(before, before).ratio("part", "whole") is None


def test_response_rates_are_of_chosen_statuses() -> None:
    snapshots = [Snapshot(0), Snapshot(2, responses={"200": 6, "429": 2})]
    assert history(*snapshots).response_rate(lambda status: status >= "400") == 1


@pytest.mark.parametrize(("share", "expected"), [(0.05, 0.05), (0.5, 0.175), (0.99, 0.25)])
def test_percentiles_lie_inside_their_bucket(share: float, expected: float) -> None:
    one = history(observed(0, 7, 8, 8), observed(1, 17, 98, 108))
    # 10 new values up to 0.1 s, 80 up to 0.25 s, 10 above.
    assert one.percentile(HISTOGRAM, share) == pytest.approx(expected)
    assert one.percentile(HISTOGRAM, share, "a") == pytest.approx(expected)


def test_there_is_no_percentile_of_nothing() -> None:
    one = history(observed(0, 1, 1, 1), observed(1, 1, 1, 1))
    assert one.percentile(HISTOGRAM, 0.5) is None
    assert one.percentile("another", 0.5) is None
    assert one.percentile(HISTOGRAM, 0.5, "b") is None
