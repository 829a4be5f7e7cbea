"""CorpusSelection: how much of which package is trained on.

Each language has a share of the wanted characters. Each package of a language gives as much as any
other, as long as it has more: so many packages are each read a little, and none dominates. Of a
package, files are taken in a random order. All of them pass one ``DocumentFilter``, so a copy of a
file in another package is found, as is any text of held-out packages and of evaluation data.

The same packages and seed give the same documents in the same order. A package of which nothing is
selected changes nothing.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.package_sources import Package, read_record
from benchmarks.training.source_files import (
    MAX_CHARACTERS,
    OTHER,
    copy_names,
    is_permissive,
    is_test,
    is_wanted,
    refusal,
    relative_paths,
)
from midfill.errors import MidfillError
from midfill.system.progress import Progress, ignore_progress
from midfill_lab.training.corpus import Document
from midfill_lab.training.filters import DocumentFilter, FilterOptions
from midfill_lab.training.licences import LicenceFinder

SHARES: Mapping[str, float] = {
    "python": 0.30,
    "typescript": 0.16,  # before JavaScript, of which some was compiled from it
    "javascript": 0.15,
    "go": 0.15,
    "rust": 0.13,
    "c": 0.09,
    OTHER: 0.02,
}
"""Share of each language in the wanted characters, in the order in which they are selected."""

_FIRST_ALLOWANCE = 30_000  # characters that each package may give before any gives more
_MAX_PACKAGE_CHARACTERS = 4_000_000
_MAX_OTHER_CHARACTERS = 60_000  # of a package, in languages without a list
_MAX_TEST_SHARE = 0.25
_OPTIONS = FilterOptions(max_characters=MAX_CHARACTERS, max_line_characters=400)


@dataclass(frozen=True, slots=True)
class _SourceFile:
    """A file that may become a document.

    Attributes:
        path: where it lies.
        name: the package's folder and the path in it.
        package: name and version of its package.
        test: whether it is a test.
    """

    path: Path
    name: str
    package: str
    test: bool


@dataclass
class _Supply:
    """What one package still has to give in one language.

    Attributes:
        files: the files left, in the order they are taken.
        characters: what was accepted of it so far.
    """

    files: deque[_SourceFile]
    characters: int = 0


@dataclass
class SelectionStatistics:
    """What was selected.

    Attributes:
        documents, characters: by language.
        tests: characters of tests by language.
        licences: characters by licence.
        packages: characters by language and package.
        refused: refused files by reason.
    """

    documents: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    tests: Counter[str] = field(default_factory=Counter)
    licences: Counter[str] = field(default_factory=Counter)
    packages: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, language: str, document: Document, size: int, *, test: bool) -> None:
        """Count a selected document of so many characters."""
        self.documents[language] += 1
        self.characters[language] += size
        self.tests[language] += size * test
        self.licences[str(document.licence)] += size
        self.packages[language][str(document.package)] += size

    def report(self) -> str:
        """Return them as text, a line for each."""
        total = sum(self.characters.values())
        lines = [f"documents: {sum(self.documents.values())}", f"characters: {total}"]
        for language, characters in self.characters.most_common():
            lines.append(
                f"{language}: {self.documents[language]} documents, {characters} characters"
                f" ({characters / total:.1%}), {len(self.packages[language])} packages,"
                f" tests {self.tests[language] / characters:.1%}"
            )
        lines += [f"licence {name}: {n} characters" for name, n in self.licences.most_common()]
        lines += [f"refused, {reason}: {n} files" for reason, n in self.refused.most_common()]
        return "\n".join(lines) + "\n"


class CorpusSelection:
    """Selects documents, language by language.

    Args:
        folder: holds the fetched packages' folders.
        held_out: packages whose copies are skipped by their names.
        held_out_texts: texts that no document may be a version of.
        protected_texts: texts that no document may copy from.
        seed: of all orders.

    Attributes:
        statistics: of what has been selected.
    """

    def __init__(
        self,
        folder: Path,
        *,
        held_out: Iterable[Package] = (),
        held_out_texts: Iterable[str] = (),
        protected_texts: Iterable[str] = (),
        seed: int = 1,
    ) -> None:
        self._folder = folder
        self._copied = copy_names(held_out)
        self._filter = DocumentFilter(_OPTIONS, protected=protected_texts, held_out=held_out_texts)
        self._licences = LicenceFinder()
        self._seed = seed
        self._unfit: Counter[str] = Counter()  # files refused before the filter, by reason
        self.statistics = SelectionStatistics()

    def select(
        self,
        packages: Mapping[str, Sequence[Package]],
        characters: int,
        progress: Progress = ignore_progress,
    ) -> list[Document]:
        """Select documents in all languages; return them in a random order.

        Args:
            packages: fetched packages by language. Files in other languages are taken from those
                of which something is selected.
            characters: how much is wanted, at most a file more per language is selected.
            progress: called with ("selecting LANGUAGE", characters so far, wanted characters).

        Raises:
            MidfillError: a package is missing.
        """
        chosen: list[Document] = []
        used: dict[str, Package] = {}
        for language, share in SHARES.items():
            some = used.values() if language == OTHER else packages.get(language, ())
            limit = _MAX_OTHER_CHARACTERS if language == OTHER else _MAX_PACKAGE_CHARACTERS
            wanted = round(share * characters)
            found = []
            for document in self._select(language, some, wanted, limit):
                progress(f"selecting {language}", self.statistics.characters[language], wanted)
                found.append(document)
            chosen += sorted(found, key=lambda document: document.name)
            gave = self.statistics.packages[language]
            used |= {str(package): package for package in some if str(package) in gave}
        random.Random(self._seed).shuffle(chosen)
        self.statistics.refused = self._unfit + Counter(
            {str(reason): count for reason, count in self._filter.refused.items()}
        )
        return chosen

    def _select(
        self, language: str, packages: Iterable[Package], wanted: int, limit: int
    ) -> Iterator[Document]:
        """Yield the documents of one language.

        Args:
            language: a key of ``SHARES``.
            packages: where they are from.
            wanted: characters of all.
            limit: characters that one package may give.
        """
        # A package's place doesn't depend on which others there are.
        order = sorted(packages, key=lambda package: self._order(language, package).random())
        found = (self._files(package, language) for package in order)
        supplies = [_Supply(deque(files)) for files in found if files]
        allowance = min(_FIRST_ALLOWANCE, limit)
        while supplies and self.statistics.characters[language] < wanted:
            for supply in supplies:
                yield from self._take(supply, language, allowance, wanted)
            supplies = [each for each in supplies if each.files and each.characters < limit]
            allowance = min(limit, allowance * 3 // 2)

    def _take(
        self, supply: _Supply, language: str, allowance: int, wanted: int
    ) -> Iterator[Document]:
        """Yield documents of a package until its allowance is used up."""
        statistics = self.statistics
        while supply.files and supply.characters < allowance:
            characters = statistics.characters[language]
            if characters >= wanted:
                return
            file = supply.files.popleft()
            if file.test and statistics.tests[language] > _MAX_TEST_SHARE * characters:
                self._unfit["enough tests"] += 1
                continue
            document = self._read(file)
            if document is None:
                continue
            size = len(document.content.decode())
            supply.characters += size
            statistics.add(language, document, size, test=file.test)
            yield document

    def _order(self, language: str, package: Package) -> random.Random:
        return random.Random(f"{self._seed}:{language}:{package}")

    def _files(self, package: Package, language: str) -> list[_SourceFile]:
        """Return a package's files in one language in random order; none if it is unwelcome."""
        folder = self._folder / package.folder_name
        record = read_record(folder)
        if record is None:
            raise MidfillError(f"{package} is not in {self._folder}: fetch it first")
        if package.registry == "debian" and not is_permissive(folder / "LICENSE"):
            self._unfit["package under several licences"] += 1
            return []
        paths = relative_paths(folder, language)
        self._order(language, package).shuffle(paths)
        return [
            _SourceFile(folder / path, f"{folder.name}/{path}", record.requirement, is_test(path))
            for path in paths
            if is_wanted(path, language, self._copied)
        ]

    def _read(self, file: _SourceFile) -> Document | None:
        """Read and judge a file; None if it is refused."""
        content = file.path.read_bytes()
        reason = refusal(content, file.path.suffix)
        if reason is not None:
            self._unfit[reason] += 1
            return None
        licence = self._licences.licence_of(self._folder, file.path, content)
        document = Document(file.name, content, licence, file.package)
        text = self._filter.accept(document)
        return None if text is None else replace(document, content=text.encode())
