"""Divergences are those of distributions that were really computed."""

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from benchmarks.precision import (
    PrecisionReport,
    Variant,
    distinct,
    measure_precision,
    precision_table,
)
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import choose_kv_cache_dtype

EXACT, SERVED = Variant("f32", "f32"), Variant("auto", "auto")
EIGHT, FOUR = Variant("q8", "f32"), Variant("q4", "i8")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PrecisionReport:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    variants = (EXACT, SERVED, EIGHT, FOUR)
    return measure_precision(str(folder), tokens=300, window=150, variants=variants, threads=1)


def test_what_is_served_is_measured_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path))
    served, half, pairs = Variant("q8", "auto"), Variant("q8", "f16"), Variant("q8", "bf16")
    other = pairs if choose_kv_cache_dtype(checkpoint, "q8", "auto").value == "f16" else half
    assert distinct(checkpoint, (served, half, pairs, EIGHT)) == (served, other, EIGHT)


def test_float32_diverges_from_itself_by_nothing(report: PrecisionReport) -> None:
    exact = report.variants[0]
    assert exact.mean == exact.p99 == 0.0
    assert exact.agreement == 1.0
    assert exact.perplexity == pytest.approx(report.perplexity)


def test_coarser_codes_diverge_more(report: PrecisionReport) -> None:
    _, served, eight, four = report.variants
    assert served.mean == 0.0  # the checkpoint stores float32
    assert (served.weights, served.kv) == ("F32", "f32")
    assert 0.0 < eight.mean < four.mean
    assert 0.0 <= eight.median <= eight.p99


def test_the_report_says_what_was_compared(report: PrecisionReport) -> None:
    assert report.tokens == 300
    text = precision_table(report).markdown()
    assert "| f32 (served) | f32 |" in text
    assert "| q4_1 (--weights q4) | i8 |" in text
    assert "without an adapter" in text
    assert f"files of {report.text}, which no adapter was trained on" in text
