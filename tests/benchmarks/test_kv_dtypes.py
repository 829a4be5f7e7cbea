"""Two formats of the KV cache are compared on the same prompts."""

from pathlib import Path

from tiny_checkpoints import write_tiny

from benchmarks.kv_dtypes import KvDtypesOptions, kv_dtypes_table, measure_kv_dtypes


def test_every_figure_is_a_ratio_of_both_formats(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path)
    options = KvDtypesOptions(
        dtypes=("f16", "bf16"), prefill=(64,), extend=(8,), contexts=(16,), pairs=6
    )
    report = measure_kv_dtypes(str(folder), options, threads=1)
    names = ["prefill of 64 tokens", "8 more tokens at 64", "decode at 16 tokens"]
    assert [figure.name for figure in report.figures] == names
    for figure in report.figures:
        assert len(figure.old) == len(figure.new) == 6
        assert 0 < figure.low <= figure.ratio <= figure.high
    text = kv_dtypes_table(report).markdown()
    assert "| measured | f16 tokens/s | bf16 tokens/s |" in text
    assert report.machine.processor in text
