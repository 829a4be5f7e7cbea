"""bench codecs: bytes and distances of coded KV from exact KV."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.codecs import CodecReport, codec_table, measure_codecs
from midfill.errors import InvalidRequestError


@pytest.fixture(scope="module")
def report(tiny_folder: Path) -> CodecReport:
    levels = ("shallow=256,deep=256", "shallow=8,deep=8")
    return measure_codecs(str(tiny_folder), levels=levels, texts=2, context=130, threads=1)


def test_more_steps_take_more_bytes_and_change_less(report: CodecReport) -> None:
    fine, coarse = report.outcomes
    assert report.raw_bytes == 3 * 2 * 32 * 2 * 4  # layers, KV heads, head_dim, K and V, float32
    assert coarse.token_bytes < fine.token_bytes < report.raw_bytes / 3
    assert 0 <= fine.divergence < coarse.divergence
    assert fine.agreement >= coarse.agreement
    assert fine.perplexity == pytest.approx(report.perplexity, rel=0.05)


def test_entropy_coding_saves_bytes(report: CodecReport) -> None:
    for one in report.outcomes:
        assert one.token_bytes < one.fixed_bytes


def test_the_table_has_exact_kv_first(report: CodecReport) -> None:
    lines = codec_table(report).markdown().splitlines()
    assert lines[2].startswith("| exact (f32) | 1,536 | 1.0 |")
    assert lines[4].startswith("| shallow=8,deep=8 |")


@pytest.mark.parametrize(
    ("layout", "bits"), [("f32", "32.00"), ("f16", "16.00"), ("bf16", "16.00")]
)
def test_exact_kv_has_the_bits_of_its_layout(report: CodecReport, layout: str, bits: str) -> None:
    table = codec_table(msgspec.structs.replace(report, layout=layout))
    assert table.rows[0]["bits/number"] == bits


def test_options_that_do_not_fit_are_refused_at_once(tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no option 'depth'"):
        measure_codecs(str(tiny_folder), levels=("depth=3",))
