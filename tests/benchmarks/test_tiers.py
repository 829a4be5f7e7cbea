"""bench tiers: every prompt is loaded from where the table says, and counted."""

from pathlib import Path

import pytest

from benchmarks.tiers import TierReport, measure_tiers, tier_table


@pytest.fixture(scope="module")
def report(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TierReport:
    return measure_tiers(
        str(tiny_folder),
        lengths=(200, 9000),
        repeats=1,
        threads=1,
        folder=tmp_path_factory.mktemp("tiers"),
    )


def test_all_whole_chunks_are_loaded(report: TierReport) -> None:
    # The longest prompt is cut to the model's context of 512 tokens.
    assert [(one.tokens, one.loaded_tokens) for one in report.outcomes] == [(200, 192), (510, 448)]


def test_files_are_as_large_as_the_kv_in_them(report: TierReport) -> None:
    token_bytes = 3 * 2 * 32 * 2 * 4  # layers, KV heads, head_dim, K and V, float32
    for one in report.outcomes:
        chunks = one.loaded_tokens // 64
        assert 0 < one.file_bytes - one.loaded_tokens * token_bytes < 1024 * chunks


def test_every_way_is_timed(report: TierReport) -> None:
    for one in report.outcomes:
        assert min(one.computed, one.stored, one.memory, one.disk, one.pool) > 0
    text = tier_table(report).markdown()
    assert "| 200 |" in text
    assert "| 510 |" in text


def test_nothing_is_left(tiny_folder: Path, tmp_path: Path) -> None:
    measure_tiers(str(tiny_folder), lengths=(100,), repeats=1, threads=1, folder=tmp_path)
    assert not list(tmp_path.iterdir())
