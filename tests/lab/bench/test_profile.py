"""A profile's parts are what was measured, add up, and stand beside what the model makes needed."""

import math

import pytest
from tiny_checkpoints import write_tiny

from midfill_lab.bench.engine_loads import Load
from midfill_lab.bench.profile import ProfileReport, measure_profile, profile_tables

pytestmark = pytest.mark.usefixtures("small_roofline")

DECODE = Load(name="decode", streams=3, context=20, repeats=10)
EXTEND = Load(name="extend", context=20, rows=40, repeats=2)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ProfileReport:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    return measure_profile(str(folder), (DECODE, EXTEND), threads=1)


def test_parts_add_up_to_the_time_of_a_step(report: ProfileReport) -> None:
    assert [profile.load for profile in report.loads] == [DECODE, EXTEND]
    for profile in report.loads:
        assert math.fsum(part.seconds for part in profile.parts) == pytest.approx(profile.seconds)
        named = {part.name: part.seconds for part in profile.parts}
        assert named["layer weights"] > 0
        assert named["output head"] > 0
        assert named["attention"] > 0
        assert named["sampling"] > 0


def test_least_bytes_are_the_weights_and_the_context(report: ProfileReport) -> None:
    decode, extend = report.loads
    weights, head, attention = decode.parts[:3]
    total = weights.bytes_least + head.bytes_least
    assert 0.5 * report.engine.weight_bytes < total <= report.engine.weight_bytes
    slot = report.engine.kv_bytes / report.engine.slots
    assert attention.bytes_least == pytest.approx(3 * 25 * slot)
    assert extend.parts[2].bytes_least == pytest.approx(60 * slot)  # K and V of its own rows, too


def test_operations_follow_the_rows(report: ProfileReport) -> None:
    decode, extend = report.loads
    assert extend.parts[0].operations_least == pytest.approx(
        decode.parts[0].operations_least * 40 / 3
    )
    assert extend.parts[1].operations_least == pytest.approx(decode.parts[1].operations_least / 3)


def test_ceilings_and_machine_are_stated(report: ProfileReport) -> None:
    ceilings = report.roofline
    assert ceilings.int8_per_second > 0
    assert ceilings.float32_per_second > 0
    text = "".join(table.markdown() for table in profile_tables(report))
    assert "| layer weights |" in text
    assert text.startswith("**decode: ")
    assert f"{ceilings.bytes_per_second / 1e9:.1f} GB/s" in text
    assert report.machine.processor in text
