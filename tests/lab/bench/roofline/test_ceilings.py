"""Ceilings are the best that a machine has shown, by the bytes that are read again and again."""

from pathlib import Path

import pytest

from midfill_lab.bench.roofline.ceilings import Resource, Roofline, RooflineProbe, cache_bytes

MEBIBYTE = 2**20


def roofline(reads: dict[int, float], float32: float = 1.0) -> Roofline:
    return Roofline(
        reads=reads,
        int8_per_second=4.0,
        bfloat16_per_second=2.0,
        float32_per_second=float32,
        cache_bytes=MEBIBYTE,
    )


def test_more_bytes_are_never_read_faster() -> None:
    found = roofline({1: 80.0, 2: 50.0, 4: 60.0, 8: 20.0})
    assert [found.read_rate(size) for size in (0, 1, 2, 3, 4, 7, 8, 100)] == [
        80.0, 80.0, 60.0, 60.0, 60.0, 60.0, 20.0, 20.0,
    ]  # fmt: skip
    assert found.bytes_per_second == 20.0


def test_the_best_of_two_moments_counts() -> None:
    first, second = roofline({1: 80.0, 8: 20.0}, 3.0), roofline({1: 70.0, 4: 50.0, 8: 30.0}, 2.0)
    best = first.best(second)
    assert best.reads == {1: 80.0, 4: 50.0, 8: 30.0}
    assert best.operation_rate(Resource.FLOAT32) == 3.0
    assert best == second.best(first)


def test_bytes_lie_in_the_cache_as_far_as_it_holds_them() -> None:
    found = roofline({1: 1.0})
    assert found.read_from(MEBIBYTE) is Resource.CACHE
    assert found.read_from(MEBIBYTE + 1) is Resource.MEMORY


def test_the_largest_cache_is_taken(tmp_path: Path) -> None:
    for number, text in enumerate(("32K", "512K", "32768K\n", "unknown", "")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(text)
    assert cache_bytes(tmp_path) == 32 * MEBIBYTE
    assert cache_bytes(tmp_path / "absent") == 0


@pytest.fixture(scope="module")
def measured() -> Roofline:
    probe = RooflineProbe(1, largest=4 * MEBIBYTE)
    try:
        return probe.measure([3 * MEBIBYTE, 99 * MEBIBYTE]).best(probe.measure())
    finally:
        probe.close()


def test_wanted_sizes_are_measured_if_the_buffer_holds_them(
    measured: Roofline,
) -> None:
    assert measured.reads.keys() == {size * MEBIBYTE // 2 for size in (1, 4, 6, 8)}
    assert max(measured.reads) == 4 * MEBIBYTE
    assert all(rate > 0 for rate in measured.reads.values())
    assert 0.0 <= measured.huge_page_share <= 1.0


def test_all_kinds_of_arithmetic_are_measured(measured: Roofline) -> None:
    kinds = (Resource.INT8, Resource.BFLOAT16, Resource.FLOAT32)
    assert all(measured.operation_rate(kind) > 0 for kind in kinds)
