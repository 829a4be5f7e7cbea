"""What was tuned takes its turn beside every alternative."""

import pytest
from tiny_checkpoints import write_tiny

from benchmarks.autotuning import (
    CHOSEN,
    AutotuningReport,
    autotuning_table,
    measure_autotuning,
)
from midfill.errors import MidfillError
from midfill.kernels.cpu.tiles import MATRICES, Prefetch
from midfill.runners.cpu.autotune import MEASURED_ROWS

PREFETCHES = [*(f"prefetch {each.name}" for each in Prefetch), CHOSEN]
HEIGHTS = ["tiles of 1 row", *(f"tiles of {height} rows" for height in (2, 3, 4)), CHOSEN]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> AutotuningReport:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    return measure_autotuning(str(folder), rounds=2, threads=1)


def test_every_setting_is_timed_in_every_round(report: AutotuningReport) -> None:
    found = [(each.rows, each.setting) for each in report.settings]
    assert found == [(1, name) for name in PREFETCHES] + [(MEASURED_ROWS, name) for name in HEIGHTS]
    for each in report.settings:
        assert len(each.seconds) == 2
        assert all(len(row) == len(MATRICES) and min(row) > 0 for row in each.seconds)


def test_the_table_has_a_row_per_setting_and_says_what_was_chosen(report: AutotuningReport) -> None:
    table = autotuning_table(report)
    assert [row["setting"] for row in table.rows] == PREFETCHES + HEIGHTS
    for row, each in zip(table.rows, report.settings, strict=True):
        assert float(row["qkv"]) == pytest.approx(each.median_ms()[0], abs=5e-4)
    for matrix, prefetch in zip(MATRICES, report.prefetches, strict=True):
        assert f"{matrix} {prefetch}" in table.caption


def test_a_chip_without_a_counter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.autotuning.ticks_per_second", lambda: float("nan"))
    with pytest.raises(MidfillError, match="counter can't be read"):
        measure_autotuning("any")
