"""Packages are fetched with pip from a folder of archives that stands for the package index."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.package_sources import (
    Package,
    fetch_package,
    fetch_packages,
    parse_requirement,
    read_record,
    read_requirements,
)
from midfill.errors import MidfillError

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: MIT\n"
BACKEND = f"""
import os
def get_requires_for_build_wheel(settings=None): return []
def prepare_metadata_for_build_wheel(folder, settings=None):
    os.makedirs(folder + "/older-0.9.dist-info")
    with open(folder + "/older-0.9.dist-info/METADATA", "w") as file:
        file.write({METADATA.format(name="older", version="0.9")!r})
    return "older-0.9.dist-info"
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of archives, the only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_wheel(index: Path, name: str, version: str, files: dict[str, str]) -> Path:
    information = f"{name}-{version}.dist-info"
    metadata = {
        f"{information}/METADATA": METADATA.format(name=name, version=version),
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/licenses/LICENSE.txt": "MIT License",
    }
    listed = "".join(f"{path},,\n" for path in [*files, *metadata])
    metadata[f"{information}/RECORD"] = listed
    path = index / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in {**files, **metadata}.items():
            wheel.writestr(member, text)
    return path


def make_source_distribution(index: Path) -> Path:
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files = {
        "pyproject.toml": project,
        "backend.py": BACKEND,
        "PKG-INFO": METADATA.format(name="older", version="0.9"),
        "src/older.py": "x = 1\n",
        "src/older.c": "int x;\n",
    }
    path = index / "older-0.9.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"older-0.9/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("older-0.9/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "pyproject.toml"
        archive.addfile(link)
    return path


def relative_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_wheels_wanted_files_are_kept_with_its_metadata(index: Path, tmp_path: Path) -> None:
    files = {"some_tool/a.py": "a = 1\n", "some_tool/b.js": "var b\n", "some_tool/c.so": "\x7fELF"}
    wheel = make_wheel(index, "some_tool", "1.2", files)
    folder = fetch_package(parse_requirement("Some.Tool == 1.2"), tmp_path / "out", (".py", ".js"))
    assert folder == tmp_path / "out" / "some-tool-1.2"
    assert relative_files(folder) == {
        "some_tool/a.py",
        "some_tool/b.js",
        "some_tool-1.2.dist-info/METADATA",
        "some_tool-1.2.dist-info/RECORD",
        "some_tool-1.2.dist-info/licenses/LICENSE.txt",
        "midfill-package.json",
    }
    record = read_record(folder)
    assert record is not None
    assert (record.archive, record.files) == (wheel.name, 2)
    assert record.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_package_without_wheels_comes_from_its_source_distribution(
    index: Path, tmp_path: Path
) -> None:
    make_source_distribution(index)
    folder = fetch_package(Package("older", "0.9"), tmp_path / "out", (".py",))
    assert relative_files(folder) == {
        "src/older.py",
        "backend.py",
        "PKG-INFO",
        "midfill-package.json",
    }


def test_what_is_there_is_not_fetched_again(index: Path, tmp_path: Path) -> None:
    packages = [Package("one", "1.0"), Package("two", "2.0")]
    wheels = [make_wheel(index, p.name, p.version, {f"{p.name}.py": "x\n"}) for p in packages]
    heard: list[tuple[int, int]] = []
    folders = fetch_packages(
        packages, tmp_path / "out", (".py",), lambda _, done, total: heard.append((done, total))
    )
    assert heard == [(0, 2), (1, 2), (2, 2)]
    for wheel in wheels:
        wheel.unlink()
    assert fetch_packages(packages, tmp_path / "out", (".py",)) == folders
    with pytest.raises(MidfillError, match=r"pip can't fetch one==1\.0"):  # other suffixes
        fetch_packages(packages, tmp_path / "out", (".js",))
    assert (folders[0] / "one.py").exists()  # what was there before stays


def test_another_file_than_the_expected_one_is_refused(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "one", "1.0", {"one.py": "x\n"})
    wrong = parse_requirement(f"one==1.0 --hash=sha256:{'0' * 64}")
    with pytest.raises(MidfillError, match="is not the expected file"):
        fetch_package(wrong, tmp_path / "out", (".py",))
    assert not any((tmp_path / "out").iterdir())


def test_members_outside_the_folder_are_left_out(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "bad", "1.0", {"../escaped.py": "x\n", "/absolute.py": "x\n", "bad.py": "x"})
    folder = fetch_package(Package("bad", "1.0"), tmp_path / "out", (".py",))
    assert {name for name in relative_files(folder) if name.endswith(".py")} == {"bad.py"}
    assert not (tmp_path / "out" / "escaped.py").exists()


def test_a_list_of_packages_is_read_as_pip_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "packages.txt"
    path.write_text(f"# held out\nclick==8.1.7\n\nrich==13.9.4 \\\n    --hash=sha256:{'ab' * 32}\n")
    assert read_requirements(path) == [
        Package("click", "8.1.7"),
        Package("rich", "13.9.4", "ab" * 32),
    ]


@pytest.mark.parametrize("text", ["click", "click>=8", "click==8.*", "==1", "-r other", "a b==1"])
def test_a_requirement_without_an_exact_version_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match="names no exact version"):
        parse_requirement(text)
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(MidfillError, match=r"list\.txt: .*names no exact version"):
        read_requirements(tmp_path / "list.txt")
