"""bench disaggregation: workers, simulator and one engine under the same load."""

from pathlib import Path

import pytest

from benchmarks.disaggregation.measure import (
    CHUNKED,
    MEASURED,
    SIMULATED,
    WHOLE,
    disaggregation_table,
    measure_disaggregation,
    placement_table,
)
from benchmarks.disaggregation.workload import DisaggregationLoad


@pytest.mark.timeout(240)
def test_all_ways_serve_every_request(tiny_folder: Path) -> None:
    load = DisaggregationLoad(
        prompts=(30, 60, 90, 120), outputs=(1, 4, 9), requests=12, simulated=40
    )
    report = measure_disaggregation(str(tiny_folder), load)
    assert list(report.runs) == [MEASURED, SIMULATED, WHOLE, CHUNKED]
    assert report.rate > 0
    assert report.transfer_seconds > 0
    for name, run in report.runs.items():
        assert run.ttft > 0
        assert run.tpot > 0
        assert (run.p99_gap is None) == (name == SIMULATED)
        assert 0 <= run.attainment <= 1
        assert (run.busy is not None) == (name in (MEASURED, SIMULATED))
    assert [found.rate / report.rate for found in report.placements] == pytest.approx([1, 2, 4, 8])
    assert len(placement_table(report).rows) == 4
    rows = disaggregation_table(report).rows
    assert [row[""] for row in rows] == [MEASURED, SIMULATED, WHOLE, CHUNKED]
