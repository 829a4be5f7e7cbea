"""Which files of packages are trained on, by their names and their content."""

from pathlib import Path, PurePosixPath

import pytest
from training_corpus import source_text

from benchmarks.package_sources import parse_requirement
from benchmarks.training.source_files import (
    MAX_CHARACTERS,
    copy_names,
    is_permissive,
    is_test,
    is_wanted,
    refusal,
    relative_paths,
)

CODE = source_text(0)


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("attr/_make.py", "python"),
        ("dist/rules.py", "python"),  # built files are a habit of the web's languages
        ("src/index.ts", "typescript"),
        ("static_site/main.js", "javascript"),
        ("README.md", "other"),
    ],
)
def test_files_that_people_wrote_are_wanted(path: str, language: str) -> None:
    assert is_wanted(PurePosixPath(path), language)


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("pip/_vendor/idna/core.py", "python"),
        ("locale/de.py", "python"),
        ("api_pb2.py", "python"),
        ("_version.py", "python"),
        ("dist/index.js", "javascript"),
        ("lib/jquery.min.js", "javascript"),
        ("index.d.mts", "typescript"),
        ("zz_generated.deepcopy.go", "go"),
        ("CHANGELOG.md", "other"),
    ],
)
def test_copies_and_generated_files_are_not(path: str, language: str) -> None:
    assert not is_wanted(PurePosixPath(path), language)


def test_copies_of_held_out_packages_are_known_by_their_names() -> None:
    lines = ("rich==15.0.0", "npm:@hapi/hapi==21.4.10", "debian:librust-csv-dev==1.1.6-1")
    names = copy_names(map(parse_requirement, lines))
    assert names == {"rich", "hapi", "hapi-hapi", "csv"}
    for path in ("app/rich/text.py", "app/_rich.py", "lib/hapi/hapi/core.js"):
        assert not is_wanted(PurePosixPath(path), "python", names)
    assert is_wanted(PurePosixPath("app/enrich.py"), "python", names)


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("tests/helpers.py", True),
        ("app/test_urls.py", True),
        ("src/url.spec.ts", True),
        ("pkg/url_test.go", True),
        ("app/attest.py", False),
        ("app/latest/urls.py", False),
    ],
)
def test_tests_are_known_by_their_names(path: str, test: bool) -> None:
    assert is_test(PurePosixPath(path)) == test


def test_paths_are_those_of_a_language_sorted(tmp_path: Path) -> None:
    for name in ("b/two.py", "b/one.py", "a.py", "a.js"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    assert list(map(str, relative_paths(tmp_path, "python"))) == ["a.py", "b/one.py", "b/two.py"]


def test_code_is_not_refused() -> None:
    assert refusal(CODE.encode(), ".py") is None


@pytest.mark.parametrize(
    ("text", "suffix", "reason"),
    [
        ("x" * (4 * MAX_CHARACTERS + 1), ".py", "too long"),
        (f"# GNU General Public License\n{CODE}", ".py", "another licence in its header"),
        ("x = 1\n", ".py", "too few lines"),
        (CODE.replace("\n", " " * 90 + "\n"), ".py", "long lines"),
        (f'Object.defineProperty(exports, "__esModule");\n{CODE}', ".js", "compiled"),
        ("1, 2, 3,\n" * 20, ".py", "data"),
        ("hello there\n" * 500, ".py", "data"),
        ("печать(имя)\n" * 20, ".py", "not in English"),
    ],
)
def test_what_people_would_not_read_is_refused(text: str, suffix: str, reason: str) -> None:
    assert refusal(text.encode(), suffix) == reason


FREE = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: somebody
License: Expat

Files: debian/*
Copyright: somebody else
License: GPL-2+
"""


@pytest.mark.parametrize(
    ("text", "permissive"),
    [
        (FREE, True),
        (FREE.replace("Expat", "GPL-3 or Expat"), True),
        (FREE.replace("debian/*", "lib/*"), False),
        ("MIT License\n", True),
        ("Licensed under the GNU General Public License.\n", False),
        (None, False),
    ],
)
def test_a_debian_package_is_permissive_as_a_whole(
    tmp_path: Path, text: str | None, permissive: bool
) -> None:
    if text is not None:
        (tmp_path / "LICENSE").write_text(text)
    assert is_permissive(tmp_path / "LICENSE") == permissive
