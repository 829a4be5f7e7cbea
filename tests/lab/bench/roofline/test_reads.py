"""The probe reads every word of what it is asked to read, in each of its ways."""

from pathlib import Path

import numpy as np
import pytest

from midfill.kernels.cpu.simd import LANES
from midfill_lab.bench.roofline import reads
from midfill_lab.bench.roofline.reads import ReadProbe

MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def probe() -> ReadProbe:
    return ReadProbe(1, largest=MEBIBYTE)


@pytest.mark.parametrize("way", range(len(reads._WAYS)), ids=map(str, reads._WAYS))
def test_every_word_is_read(probe: ReadProbe, way: int) -> None:
    words = 4 * reads._SHARE_WORDS
    buffer, sync = np.zeros(words, np.int32), np.zeros(1, np.int64)
    random = np.random.default_rng(way)
    for place in (0, words - 1, *random.integers(0, words, 40).tolist()):
        buffer[:] = 0
        buffer[place] = 1 << 20
        sink = np.zeros(2 * LANES, np.int32)
        for thread in range(2):
            reads._read(thread, 2, sync, buffer, 0, words, 1, way, sink)
        owner, lane = place // (words // 2), place % LANES
        assert sink.nonzero()[0].tolist() == [owner * LANES + lane]


def test_no_word_outside_a_slice_is_read() -> None:
    words = 2 * reads._SHARE_WORDS
    buffer, sink = np.ones(3 * words, np.int32), np.zeros(LANES, np.int32)
    buffer[words : 2 * words] = 2
    reads._read(0, 1, np.zeros(1, np.int64), buffer, words, words, 1, 0, sink)
    assert sink.tolist() == [2] * LANES


def test_sizes_are_whole_shares_and_fit_the_buffer(probe: ReadProbe) -> None:
    found = probe.rates([300_000, 2 * MEBIBYTE])
    unit = 4 * reads._SHARE_WORDS
    assert list(found) == [300_000 // unit * unit, MEBIBYTE // 2, MEBIBYTE]
    assert all(rate > 0 for rate in found.values())
    assert all(probe.way(size) in reads._WAYS for size in found)


def test_what_is_larger_than_a_slice_is_read_slice_by_slice(
    probe: ReadProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_RUN_BYTES", 300_000)
    runs: list[tuple[int, int]] = []
    monkeypatch.setattr(
        probe._pool, "run", lambda _, buffer, first, words, *rest: runs.append((first, words))
    )
    probe.rates([])
    large = [run for run in runs if run[1] != MEBIBYTE // 8][-4 * reads._RUNS :]
    covered = sorted(set(large))
    assert [first for first, _ in covered] == [0, *np.cumsum([n for _, n in covered])[:-1]]
    assert sum(words for _, words in covered) == MEBIBYTE // 4


def test_huge_pages_are_looked_up_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = (
        "7f0000000000-7f0000200000 rw-p 00000000 00:00 0\nRss: 4 kB\nAnonHugePages: 0 kB\n"
        "7f0000200000-7f0000600000 rw-p 00000000 00:00 0\nAnonHugePages:    2048 kB\n"
    )
    file = tmp_path / "smaps"
    file.write_text(maps)
    monkeypatch.setattr(reads, "_SMAPS", file)
    assert reads._huge_bytes(0x7F0000200000) == 2 * MEBIBYTE
    assert reads._huge_bytes(0x7F0000100000) == 0
    monkeypatch.setattr(reads, "_SMAPS", file.parent / "absent")
    assert reads._huge_bytes(0x7F0000200000) == 0


def test_a_plain_read_goes_over_the_bytes_once_and_scales_what_the_buffer_lacks(
    probe: ReadProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        probe._pool,
        "run",
        lambda _, buffer, first, words, passes, *rest: runs.append((first, words, passes)),
    )
    ticks = iter(range(10_000))
    monkeypatch.setattr(reads.time, "perf_counter", lambda: float(next(ticks)))
    assert probe.pass_seconds(MEBIBYTE) == 1.0
    assert probe.pass_seconds(3 * MEBIBYTE) == 3.0
    assert set(runs) == {(0, MEBIBYTE // 4, 1)}
    assert len(runs) == 2 * reads._PASSES
