"""limiting_groups: the own group and its ancestors, wherever version 1 or 2 mounts them."""

from pathlib import Path

import pytest

from midfill.system.cgroup import limiting_groups, read_text


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
