"""Selection: shares of languages and packages, and what is kept out of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fetched_packages import put_package
from training_corpus import source_text

from benchmarks.package_sources import Package
from benchmarks.training import corpus_selection
from benchmarks.training.corpus_selection import CorpusSelection
from midfill.errors import MidfillError
from midfill_lab.training.corpus import Document

FIRST, SECOND, THIRD = Package("first", "1.0"), Package("second", "2.0"), Package("third", "3.0")
ENOUGH = 10**7
SIZE = len(source_text(0))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with three packages of ten files of Python each."""
    for number, package in enumerate((FIRST, SECOND, THIRD)):
        texts = {f"{name}.py": source_text(100 * number + name) for name in range(10)}
        put_package(tmp_path, package, texts)
    return tmp_path


def select(
    folder: Path, python: Sequence[Package], characters: int = ENOUGH, **settings: Any
) -> list[Document]:
    return CorpusSelection(folder, **settings).select({"python": python}, characters)


def names(documents: Iterable[Document]) -> list[str]:
    return [document.name for document in documents]


def test_documents_name_their_package_and_licence(packages: Path) -> None:
    documents = select(packages, [FIRST])
    assert sorted(names(documents)) == [f"first-1.0/{name}.py" for name in range(10)]
    document = next(each for each in documents if each.name == "first-1.0/3.py")
    assert document == Document(document.name, source_text(3).encode(), "MIT", "first==1.0")


def test_the_seed_alone_decides_the_order(packages: Path) -> None:
    selected = names(select(packages, [FIRST, SECOND]))
    assert names(select(packages, [SECOND, FIRST])) == selected
    assert names(select(packages, [FIRST, SECOND], seed=2)) != selected


def test_each_package_gives_as_much_as_any_other(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_selection, "_FIRST_ALLOWANCE", 2 * SIZE)
    selection = CorpusSelection(packages)
    selection.select({"python": [FIRST, SECOND, THIRD]}, round(6 * SIZE / 0.3))
    gave = selection.statistics.packages["python"]
    assert len(gave) == 3
    assert max(gave.values()) <= 3.2 * SIZE


def test_a_language_gets_its_share(packages: Path) -> None:
    web = Package("web", "1")
    put_package(packages, web, {f"{name}.ts": source_text(500 + name) for name in range(10)})
    selection = CorpusSelection(packages)
    selection.select({"python": [FIRST], "typescript": [web]}, 20 * SIZE)
    characters = selection.statistics.characters
    for language, share in (("python", 0.3), ("typescript", 0.16)):
        assert 0 <= characters[language] - share * 20 * SIZE < 1.1 * SIZE


def test_other_languages_are_read_of_packages_that_gave_something(packages: Path) -> None:
    used, unused = Package("used", "1"), Package("unused", "1")
    put_package(packages, used, {"guide.md": source_text(700), "a.py": source_text(701)})
    put_package(packages, unused, {"guide.md": source_text(702), "a.py": "x = 1\n"})
    assert sorted(names(select(packages, [used, unused]))) == ["used-1/a.py", "used-1/guide.md"]


def test_tests_are_taken_until_there_are_enough(packages: Path) -> None:
    tested = Package("tested", "1")
    put_package(packages, tested, {f"tests/{n}.py": source_text(800 + n) for n in range(20)})
    selection = CorpusSelection(packages)
    selection.select({"python": [FIRST, tested]}, ENOUGH)
    statistics = selection.statistics
    assert 0 < statistics.tests["python"] <= 0.4 * statistics.characters["python"]
    assert statistics.refused["enough tests"] > 10


def test_held_out_and_protected_texts_are_kept_out(packages: Path) -> None:
    put_package(packages, FIRST, {"rich/copy.py": source_text(900)})
    documents = select(
        packages,
        [FIRST],
        held_out=[Package("rich", "15.0.0")],
        held_out_texts=[source_text(0)],
        protected_texts=[source_text(1)],
    )
    assert sorted(names(documents)) == [f"first-1.0/{name}.py" for name in range(2, 10)]


def test_a_package_of_which_nothing_is_selected_changes_nothing(packages: Path) -> None:
    protected = source_text(950)
    copier = Package("copier", "1")
    copies = {f"{name}.py": f"{source_text(name)}\n{protected}" for name in range(10)}
    put_package(packages, copier, copies)
    for seed in range(1, 5):  # for some of them, the copier comes first
        alone, beside = (
            select(packages, some, seed=seed, protected_texts=[protected])
            for some in ([FIRST], [FIRST, copier])
        )
        assert len(alone) == 10
        assert beside == alone


def test_a_debian_package_under_several_licences_is_refused(packages: Path) -> None:
    package = Package("golang-x-dev", "1", registry="debian")
    put_package(packages, package, {"LICENSE": "GPL-2\n", "a.go": source_text(1)})
    selection = CorpusSelection(packages)
    assert selection.select({"go": [package]}, ENOUGH) == []
    assert selection.statistics.refused == {"package under several licences": 1}


def test_the_report_has_a_line_for_each_number(packages: Path) -> None:
    put_package(packages, FIRST, {"short.py": "x = 1\n"})
    selection = CorpusSelection(packages)
    selection.select({"python": [FIRST]}, ENOUGH)
    report = selection.statistics.report().splitlines()
    assert report[0] == "documents: 10"
    assert "(100.0%), 1 packages, tests 0.0%" in report[2]
    assert report[-1] == "refused, too few lines: 1 files"


def test_packages_must_have_been_fetched(packages: Path) -> None:
    with pytest.raises(MidfillError, match=r"absent==1 is not in .*: fetch it first"):
        select(packages, [Package("absent", "1")])
