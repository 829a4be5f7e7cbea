"""bench stops: prefills with stops and without, in turn, beside a control."""

from pathlib import Path

from benchmarks.stops import measure_stops, stops_table

LAYERS = 3


def test_reports_ratios_with_intervals_and_a_control(tiny_folder: Path) -> None:
    report = measure_stops(str(tiny_folder), rows=64, pairs=6, threads=1)
    assert (report.rows, report.stops, report.pairs) == (64, LAYERS + 1, 6)
    assert report.empty_call > 0
    for ratio in (report.wall, report.processor, report.control):
        assert 0 < ratio.low <= ratio.median <= ratio.high
    text = stops_table(report).markdown()
    assert "a prefill of 64 rows that stops 4 times" in text
    assert text.count("\n| with") == 3
