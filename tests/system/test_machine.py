"""Cores and memory: what the host has, and what control groups of versions 1 and 2 leave of it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from midfill.system.machine import (
    available_memory,
    available_threads,
    is_local,
    limiting_groups,
    read_text,
)

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
    code = "from midfill.system.machine import available_threads; print(available_threads())"
    found = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    assert 1 <= found <= (os.cpu_count() or 1)


def groups(folder: Path, controller: str, membership: str) -> list[str]:
    (folder / "cgroup").write_text(membership)
    root = folder / "fs"
    found = limiting_groups(controller, root=root, membership=folder / "cgroup")
    return [str(path.relative_to(root)) for path in found]


def test_the_own_group_comes_before_its_ancestors(tmp_path: Path) -> None:
    assert groups(tmp_path, "cpu", "0::/a/b\n") == ["a/b", "a", "."]


def test_version_1_controllers_are_found_under_both_mounts(tmp_path: Path) -> None:
    found = groups(tmp_path, "cpu", "4:memory:/m\n3:cpu,cpuacct:/a\n")
    assert found == ["cpu,cpuacct/a", "cpu,cpuacct", "cpu/a", "cpu"]
    assert groups(tmp_path, "memory", "4:memory:/m\n")[:2] == ["memory/m", "memory"]


def test_a_group_outside_the_own_root_is_the_mount_itself(tmp_path: Path) -> None:
    assert groups(tmp_path, "cpu", "0::/../../system.slice\n") == ["."]


@pytest.mark.parametrize("membership", ["", "\n", "0\n", "nonsense", "::::\n", "2:cpuset:/a\n"])
def test_odd_memberships_name_no_group_but_the_root(tmp_path: Path, membership: str) -> None:
    assert set(groups(tmp_path, "cpu", membership)) <= {"."}


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert read_text(tmp_path / "binary") == read_text(tmp_path) == read_text(tmp_path / "no") == ""


MIB = 2**20
HOST = 1000 * MIB
UNLIMITED_V1 = 2**63 - 4096  # what version 1 reports where no limit is set


def group(maximum: object, used: int = 0, cached: int = 0) -> dict[str, str]:
    """Return the files of a version 2 group."""
    return {
        "memory.max": f"{maximum}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def group_v1(maximum: int, used: int = 0, cached: int = 0) -> dict[str, str]:
    """Return the files of a version 1 group."""
    return {
        "memory.limit_in_bytes": f"{maximum}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
    }


def available(root: Path, membership: str, groups: Mapping[str, Mapping[str, str]]) -> int:
    """Return what is found by a process in these groups, given the groups' files."""
    for folder, files in groups.items():
        for name, content in files.items():
            path = root / "fs" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    (root / "cgroup").write_text(membership)
    (root / "meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {HOST // 1024} kB\n")
    return available_memory(root=root / "fs", membership=root / "cgroup", meminfo=root / "meminfo")


def test_without_a_limit_the_host_decides(tmp_path: Path) -> None:
    assert available(tmp_path, "0::/app\n", {"app": group("max", 700 * MIB)}) == HOST
    assert available(tmp_path, "", {}) == HOST


def test_a_limit_above_what_the_host_has_changes_nothing(tmp_path: Path) -> None:
    assert available(tmp_path, "0::/app\n", {"app": group(5000 * MIB)}) == HOST


def test_the_limit_of_the_own_group_counts_less_what_is_used(tmp_path: Path) -> None:
    found = available(tmp_path, "0::/app\n", {"app": group(300 * MIB, 100 * MIB)})
    assert found == 200 * MIB


def test_cached_file_pages_count_as_free(tmp_path: Path) -> None:
    found = available(tmp_path, "0::/app\n", {"app": group(300 * MIB, 100 * MIB, 40 * MIB)})
    assert found == 240 * MIB


def test_the_tightest_of_the_own_group_and_its_ancestors_counts(tmp_path: Path) -> None:
    own, parent, top = group(400 * MIB), group(600 * MIB, 500 * MIB), group(500 * MIB)
    groups = {"": top, "a": parent, "a/b": own}
    assert available(tmp_path, "0::/a/b\n", groups) == 100 * MIB
    assert available(tmp_path, "0::/other\n", groups) == 500 * MIB


def test_groups_beside_the_own_one_do_not_count(tmp_path: Path) -> None:
    assert available(tmp_path, "0::/a/b\n", {"a/c": group(MIB)}) == HOST


@pytest.mark.parametrize("name", ["/", "/docker/f00d", "/../../system.slice"])
def test_memory_of_a_container_is_limited_however_its_group_is_named(
    tmp_path: Path, name: str
) -> None:
    assert available(tmp_path, f"0::{name}\n", {"": group(300 * MIB)}) == 300 * MIB


def test_limits_of_version_1(tmp_path: Path) -> None:
    groups = {
        "memory": group_v1(UNLIMITED_V1),
        "memory/app": group_v1(300 * MIB, 250 * MIB, 30 * MIB),
        "memory/app/worker": group_v1(UNLIMITED_V1),
        "cpu/app": group_v1(MIB),
    }
    membership = "9:name=systemd:/app\n4:memory:/app/worker\n3:cpu,cpuacct:/app\n0::/\n"
    assert available(tmp_path, membership, groups) == 80 * MIB


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    assert available(tmp_path, "0::/\n", {"": group(100 * MIB, 120 * MIB)}) == 0


@pytest.mark.parametrize("maximum", ["", "a lot", "-1", "1.5"])
def test_odd_files_limit_no_memory(tmp_path: Path, maximum: str) -> None:
    assert available(tmp_path, "0::/\n", {"": group(maximum)}) == HOST


def test_without_any_report_there_is_still_a_positive_guess(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert available_memory(root=nowhere, membership=nowhere, meminfo=nowhere) > 0


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000/v1", True),
        ("http://localhost", True),
        ("http://10.0.0.1:8000", False),
        ("https://example.org", False),
        ("", False),
    ],
)
def test_a_url_of_this_machine_is_known(url: str, local: bool) -> None:
    assert is_local(url) == local
