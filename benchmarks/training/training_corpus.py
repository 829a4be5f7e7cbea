"""The corpus of a recipe: its packages are fetched, and documents of them selected.

A recipe's folder names packages with exact versions and digests: ``LANGUAGE.txt`` what is trained
on, ``held_out/*.txt`` what no document may be a version of, ``protected.txt`` packages of
evaluation data that no document may copy from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.package_sources import Package, fetch_packages, read_requirements
from benchmarks.training.corpus_selection import (
    SHARES,
    CorpusSelection,
    SelectionStatistics,
)
from benchmarks.training.source_files import OTHER, SUFFIXES
from midfill.errors import MidfillError
from midfill.system.files import replacing_file, write_file
from midfill.system.progress import Progress, ignore_progress
from midfill_lab.training.corpus import RECORD_SUFFIXES, Corpus, Document

CORPUS = "corpus.jsonl"
"""Name of the file of documents."""

STATISTICS = "statistics.txt"
"""Name of the file that says what was selected."""

_ALL_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
_CODE_SUFFIXES = tuple(each for each in _ALL_SUFFIXES if each not in SUFFIXES[OTHER])
_PROTECTED_SUFFIXES = (".gz", ".jsonl")


@dataclass(frozen=True)
class PackageLists:
    """The packages that a recipe names.

    Attributes:
        trained: what is trained on, by language.
        held_out: what no document may be a version of.
        protected: what no document may copy from.
    """

    trained: Mapping[str, Sequence[Package]]
    held_out: Sequence[Package]
    protected: Sequence[Package]


def read_package_lists(recipe: Path) -> PackageLists:
    """Read the lists in a recipe's folder.

    Raises:
        MidfillError: a list is missing or not understood.
    """
    languages = [language for language in SHARES if language != OTHER]
    held_out = sorted((recipe / "held_out").glob("*.txt"))
    if not held_out:
        raise MidfillError(f"{recipe / 'held_out'}: there are no lists of held-out packages")
    return PackageLists(
        {language: read_requirements(recipe / f"{language}.txt") for language in languages},
        [package for path in held_out for package in read_requirements(path)],
        read_requirements(recipe / "protected.txt"),
    )


def write_corpus(
    lists: PackageLists, folder: Path, characters: int, progress: Progress = ignore_progress
) -> SelectionStatistics:
    """Fetch packages and select documents of them.

    Args:
        lists: the packages.
        folder: gets ``CORPUS``, ``STATISTICS`` and the packages; those there are not fetched again.
        characters: wanted length of the corpus.
        progress: see ``fetch_packages`` and ``CorpusSelection.select``.

    Raises:
        MidfillError: a package can't be fetched, or the folder can't be written.
    """
    trained = list(dict.fromkeys(each for some in lists.trained.values() for each in some))
    fetch_packages(trained, folder / "packages", _ALL_SUFFIXES, progress)
    held_out = fetch_packages(lists.held_out, folder / "held-out", _ALL_SUFFIXES, progress)
    protected = fetch_packages(lists.protected, folder / "protected", _PROTECTED_SUFFIXES, progress)
    selection = CorpusSelection(
        folder / "packages",
        held_out=lists.held_out,
        held_out_texts=Corpus.find(held_out, _CODE_SUFFIXES).texts(),
        protected_texts=Corpus.find(_record_files(protected), ()).texts(),
    )
    documents = selection.select(lists.trained, characters, progress)
    try:
        _write_documents(folder / CORPUS, documents)
        write_file(folder / STATISTICS, selection.statistics.report())
    except OSError as error:
        raise MidfillError(f"{folder}: can't be written: {error.strerror or error}") from None
    return selection.statistics


def _record_files(folders: Sequence[Path]) -> list[Path]:
    """Return the files of records in packages, sorted."""
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.name.endswith(RECORD_SUFFIXES)
    )


def _write_documents(path: Path, documents: Sequence[Document]) -> None:
    """Write documents as JSON lines."""
    with (
        replacing_file(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as file,
    ):
        for document in documents:
            record = {
                "path": document.name,
                "license": document.licence,
                "package": document.package,
                "content": document.content.decode(),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
