"""The memory's bandwidth: measured once, kept, and never made slower by what else runs."""

from pathlib import Path

import pytest

from midfill.system import bandwidth
from midfill.system.bandwidth import measure_bandwidth, memory_bandwidth


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """What measurements find, the next one last."""
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path))
    found: list[float] = []
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda threads: found.pop())
    return found


def test_it_is_measured_once_and_the_fastest_is_kept(measured: list[float]) -> None:
    measured[:] = [3e9, 1e9, 2e9]
    assert memory_bandwidth() == memory_bandwidth() == 2e9
    assert memory_bandwidth(anew=True) == 2e9  # 1e9 was beside other work
    assert memory_bandwidth(anew=True) == memory_bandwidth() == 3e9


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"processor": "other", "cores": 1, "bytes_per_second": 9.0}']
)
def test_it_is_measured_where_what_is_kept_is_of_no_use(
    measured: list[float], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "bandwidth.json").write_bytes(content)
    measured[:] = [2e9]
    assert memory_bandwidth() == 2e9


def test_a_measurement_is_of_some_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(bandwidth, "_SECONDS", 0.0)
    assert 1e6 < measure_bandwidth(2) < 1e13
