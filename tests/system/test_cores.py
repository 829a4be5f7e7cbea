"""available_threads: the affinity mask, and the quotas of control groups, which leave less."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from midfill.system.cores import available_threads

CORES = 64


@pytest.fixture(autouse=True)
def large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)), raising=False)


def threads(root: Path, membership: str, files: Mapping[str, str | bytes]) -> int:
    """What is found where a process is in these groups and the groups' files hold this."""
    for name, content in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    (root / "cgroup").write_text(membership)
    return available_threads(root=root / "fs", membership=root / "cgroup")


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000\n", CORES),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("20000 100000\n", 1),
        ("1000 1000000\n", 1),
        ("25000 10000\n", 3),
        ("9000000 100000\n", CORES),
    ],
)
def test_a_quota_of_version_2_is_rounded_up_and_never_more_than_the_cores(
    tmp_path: Path, quota: str, expected: int
) -> None:
    assert threads(tmp_path, "0::/app\n", {"app/cpu.max": quota}) == expected


def test_the_least_quota_of_a_group_and_those_above_counts(tmp_path: Path) -> None:
    assert threads(tmp_path, "0::/a/b/c\n", {"a/b/c/cpu.max": "max 100000"}) == CORES
    assert threads(tmp_path, "0::/a/b/c\n", {"a/b/cpu.max": "800000 100000"}) == 8
    assert threads(tmp_path, "0::/a/b/c\n", {"a/cpu.max": "300000 100000"}) == 3
    assert threads(tmp_path, "0::/a/b/c\n", {"a/b/c/cpu.max": "400000 100000"}) == 3
    assert threads(tmp_path, "0::/other\n", {}) == CORES


@pytest.mark.parametrize("group", ["/", "/docker/f00d", "/../../system.slice"])
def test_in_a_container_the_mount_is_its_own_group_however_it_is_named(
    tmp_path: Path, group: str
) -> None:
    assert threads(tmp_path, f"0::{group}\n", {"cpu.max": "200000 100000"}) == 2


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "expected"), [("-1\n", CORES), ("250000\n", 3)])
def test_quotas_of_version_1(tmp_path: Path, mount: str, quota: str, expected: int) -> None:
    files = {f"{mount}/app/cpu.cfs_quota_us": quota, f"{mount}/app/cpu.cfs_period_us": "100000"}
    membership = "9:name=systemd:/app\n4:memory:/app\n3:cpu,cpuacct:/app/worker\n0::/\n"
    assert threads(tmp_path, membership, files) == expected


def test_groups_of_other_controllers_dont_count(tmp_path: Path) -> None:
    files = {"cpuset/app/cpu.cfs_quota_us": "1", "cpuset/app/cpu.cfs_period_us": "1"}
    assert threads(tmp_path, "2:cpuset:/app\n", files) == CORES


@pytest.mark.parametrize(
    "content", ["", "max", "100000", "a lot", "0 0", "100000 0", "1.5 1", "1 2 3", b"\xff\xfe 1"]
)
def test_odd_files_are_no_limit(tmp_path: Path, content: str | bytes) -> None:
    assert threads(tmp_path, "0::/\n", {"cpu.max": content}) == CORES


@pytest.mark.parametrize("membership", ["", "\n", "0\n", "nonsense", "0::relative\n", "::::\n"])
def test_odd_memberships_are_no_limit(tmp_path: Path, membership: str) -> None:
    assert threads(tmp_path, membership, {}) == CORES


def test_nothing_to_read_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").mkdir()
    nowhere = tmp_path / "nowhere"
    assert available_threads(root=nowhere, membership=nowhere) == CORES
    (tmp_path / "cgroup").write_text("0::/\n")
    assert available_threads(root=tmp_path, membership=tmp_path / "cgroup") == CORES


def test_systems_without_affinity_count_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_threads(membership=tmp_path / "nowhere") == 6


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_this_machine_gives_at_least_one_and_at_most_its_cores() -> None:
    code = "from midfill.system.cores import available_threads; print(available_threads())"
    found = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    assert 1 <= found <= (os.cpu_count() or 1)
