"""Others' processor time is what is neither idle nor this process's own."""

import os
from pathlib import Path

import pytest

from midfill_lab.bench.neighbours import Neighbours, busy_processes

RATE = os.sysconf("SC_CLK_TCK")


def stat(path: Path, **seconds: int) -> Path:
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "gn")
    ticks = (str(seconds.get(name, 0) * RATE) for name in names)
    path.write_text(f"cpu  {' '.join(ticks)}\ncpu0 1 2 3\n")
    return path


@pytest.fixture
def own_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What this process has used so far."""
    used = [5.0]
    monkeypatch.setattr(os, "times", lambda: os.times_result((used[0], 0.0, 0.0, 0.0, 0.0)))
    return used


def test_shares_are_of_what_passed_since(tmp_path: Path, own_seconds: list[float]) -> None:
    path = tmp_path / "stat"
    neighbours = Neighbours(stat(path, user=100, idle=100, guest=50))
    own_seconds[0] += 30
    stat(path, user=140, nice=5, idle=130, iowait=20, steal=5, guest=70)
    assert neighbours.share() == pytest.approx((40 + 5 + 5 - 30) / 100)


def test_a_machine_of_its_own_has_no_others(tmp_path: Path, own_seconds: list[float]) -> None:
    path = tmp_path / "stat"
    neighbours = Neighbours(stat(path, user=100, idle=100))
    own_seconds[0] += 41  # the two clocks are not read at once
    stat(path, user=140, idle=160)
    assert neighbours.share() == 0.0


@pytest.mark.parametrize("text", ["", "cpu  a b\n"])
def test_where_the_system_does_not_say_it_is_unknown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stat"
    assert Neighbours(path).share() is None
    path.write_text(text)
    assert Neighbours(path).share() is None


def test_busy_processes_run_until_they_are_no_longer_wanted() -> None:
    def children() -> set[str]:
        return {
            path.parent.name
            for path in Path("/proc").glob("[0-9]*/stat")
            if path.read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())
        }

    before = children()
    with busy_processes(2):
        assert len(children() - before) == 2
    assert children() <= before
