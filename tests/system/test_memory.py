"""available_memory: what the host has, and what control groups leave of it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from midfill.system.memory import available_memory

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
def test_in_a_container_the_mount_is_its_own_group_however_it_is_named(
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
def test_odd_files_are_no_limit(tmp_path: Path, maximum: str) -> None:
    assert available(tmp_path, "0::/\n", {"": group(maximum)}) == HOST


def test_without_any_report_there_is_still_a_positive_guess(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert available_memory(root=nowhere, membership=nowhere, meminfo=nowhere) > 0
