"""Packages are fetched with pip from a folder of archives that stands for the package index.

npm and apt-get are programs that copy an archive from such a folder.
"""

import hashlib
import io
import json
import shutil
import subprocess
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
from midfill_lab.training.licences import LicenceFinder

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


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of archives; npm and apt-get deliver the one that their last word names."""
    folder, programs = tmp_path / "registry", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    for name in ("npm", "apt-get"):
        program = programs / name
        program.write_text(
            f'#!/bin/sh\nfor word; do :; done\necho "no such package: $word" >/dev/stderr\n'
            f'cp "{folder}/$(echo "$word" | tr / _)"* .\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return folder


def test_an_npm_package_leaves_out_what_compilers_wrote(registry: Path, tmp_path: Path) -> None:
    files = {
        "package.json": json.dumps({"name": "@some/tool", "license": "MIT"}),
        "src/a.ts": "let a = 1\n",
        "dist/a.d.ts": "declare let a: number\n",
        "dist/a.js": "var a = 1\n",
        "dist/a.min.js": "a=1\n",
    }
    with tarfile.open(registry / "@some_tool@1.0.tgz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    package = parse_requirement("npm:@some/tool==1.0")
    folder = fetch_package(package, tmp_path / "out", (".ts", ".js"))
    assert folder.name == "npm-some-tool-1.0"
    assert relative_files(folder) == {
        "package.json",
        "src/a.ts",
        "dist/a.js",
        "midfill-package.json",
    }


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_debian_packages_copyright_file_is_the_licence_of_its_files(
    registry: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    for name, text in {
        "DEBIAN/control": "Package: some-dev\nVersion: 1:2.0~ds1-1\nArchitecture: all\n"
        "Maintainer: Somebody <somebody@example.org>\nDescription: a package\n",
        "usr/share/gocode/src/some/a.go": "package some\n",
        "usr/share/doc/some-dev/copyright": "Permission is hereby granted, free of charge",
        "usr/share/doc/some-dev/changelog": "some changes\n",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    archive = registry / "some-dev=1:2.0~ds1-1.deb"
    subprocess.run(["dpkg-deb", "--build", str(tree), str(archive)], check=True)
    package = parse_requirement("debian:some-dev==1:2.0~ds1-1")
    folder = fetch_package(package, tmp_path / "out", (".go",))
    assert folder.name == "debian-some-dev-1-2.0~ds1-1"
    assert relative_files(folder) == {
        "LICENSE",
        "usr/share/gocode/src/some/a.go",
        "midfill-package.json",
    }
    source = folder / "usr/share/gocode/src/some/a.go"
    assert LicenceFinder().licence_of(tmp_path / "out", source, source.read_bytes()) == "MIT"


@pytest.mark.parametrize("program", ["npm", "apt-get"])
def test_another_registrys_complaint_is_one_line(
    registry: Path, tmp_path: Path, program: str
) -> None:
    name = "npm:nothing" if program == "npm" else "debian:nothing"
    with pytest.raises(MidfillError, match=f"{program} can't fetch {name}==1") as caught:
        fetch_package(parse_requirement(f"{name}==1"), tmp_path / "out", (".js",))
    assert "\n" not in str(caught.value)


def test_a_registry_without_its_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MidfillError, match="fetching npm:some==1 needs npm"):
        fetch_package(parse_requirement("npm:some==1"), tmp_path / "out", (".js",))


def test_packages_may_name_the_files_that_are_wanted_of_them(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "one", "1.0", {"one.py": "x\n", "one.js": "x\n"})
    package = Package("one", "1.0", suffixes=(".js",))
    (folder,) = fetch_packages([package], tmp_path / "out", (".py",))
    assert (folder / "one.js").exists()
    assert not (folder / "one.py").exists()
