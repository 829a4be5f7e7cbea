"""Every format takes its turn in every round, and the table says how they compare."""

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from benchmarks.kv_cache_dtypes import (
    DTYPES,
    KVCacheDtypesReport,
    kv_cache_dtypes_table,
    measure_kv_cache_dtypes,
)
from midfill.errors import OptionError


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> KVCacheDtypesReport:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    return measure_kv_cache_dtypes(str(folder), contexts=(50, 300), rounds=2, threads=1)


def test_all_steps_are_timed_with_all_formats(report: KVCacheDtypesReport) -> None:
    names = ["decode after 50", "decode after 300", "prefill 256 after 44"]
    assert [step.step for step in report.steps] == names
    for step in report.steps:
        assert tuple(step.seconds) == DTYPES
        assert all(len(each) == 2 and min(each) > 0 for each in step.seconds.values())


def test_four_bits_take_less_than_a_third_of_sixteen(report: KVCacheDtypesReport) -> None:
    sizes = report.slot_bytes
    assert sizes["f16"] == sizes["bf16"] > sizes["i8"] > sizes["i4"]
    assert sizes["f16"] / sizes["i4"] > 3


def test_the_table_has_a_row_per_step(report: KVCacheDtypesReport) -> None:
    table = kv_cache_dtypes_table(report)
    assert len(table.rows) == 4
    assert table.rows[1]["f16"].endswith("(1.00x)")


def test_a_context_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path)
    with pytest.raises(OptionError, match="the model's is shorter"):
        measure_kv_cache_dtypes(str(folder), contexts=(100_000,))
