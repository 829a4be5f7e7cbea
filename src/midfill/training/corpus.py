"""Corpus: the files that documents are read from, and the order in which they are."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from midfill.errors import MidfillError
from midfill.training.documents import RECORD_ENDINGS, Document, documents_of, records_of
from midfill.training.licences import LicenceFinder

_SKIPPED_FOLDERS = frozenset({"__pycache__", ".git", ".hg", "node_modules", ".venv"})
_SHUFFLED = 4096  # records of a file that is read in order are shuffled among so many


@dataclass(frozen=True)
class Corpus:
    """Where documents are.

    Attributes:
        files: (root, file) pairs of text files; names and licences are told from the root down.
        records: JSONL and parquet files.
    """

    files: tuple[tuple[Path, Path], ...]
    records: tuple[Path, ...]
    _licences: LicenceFinder = field(default_factory=LicenceFinder, compare=False, repr=False)

    @classmethod
    def find(cls, sources: Iterable[Path], suffixes: Sequence[str]) -> "Corpus":
        """The files of some sources.

        Args:
            sources: folders, ``.jsonl``, ``.jsonl.gz`` and ``.parquet`` files, or text files.
            suffixes: endings of the files wanted from folders, such as ".py".

        Raises:
            MidfillError: a source is missing, or there is nothing to read.
        """
        files: list[tuple[Path, Path]] = []
        records: list[Path] = []
        for source in sources:
            if source.is_dir():
                files += [(source, path) for path in _below(source, frozenset(suffixes))]
            elif not source.is_file():
                raise MidfillError(f"{source}: no such file or folder")
            elif source.name.endswith(RECORD_ENDINGS):
                records.append(source)
            else:
                files.append((source.parent, source))
        if not files and not records:
            raise MidfillError(
                f"no documents: the folders hold no {' or '.join(suffixes)} file; other endings "
                f"are set by the recipe, and {', '.join(RECORD_ENDINGS)} files are named themselves"
            )
        return cls(tuple(files), tuple(records))

    def read(self, seed: int) -> Iterator[Document]:
        """The documents in a random order, read one at a time.

        Files come in any order over all folders, records shuffled among their neighbours; both
        kinds are mixed by their share. Files that can't be read any more are left out.

        Args:
            seed: of the order; the same seed gives the same order.

        Raises:
            MidfillError: a file of records is broken.
        """
        order = random.Random(seed)
        files = list(self.files)
        order.shuffle(files)
        streams = [_shuffled(documents_of(path), order) for path in self.records]
        weights = [1.0] * len(streams)
        if files:
            streams.append(self._read_files(files))
            weights.append(max(1.0, len(files) / 1000))
        while streams:
            at = order.choices(range(len(streams)), weights)[0]
            document = next(streams[at], None)
            if document is None:
                del streams[at], weights[at]
            else:
                yield document

    def texts(self) -> list[str]:
        """All documents as text, whatever their encoding; of records, each field that is text."""
        texts = [path.read_text("utf-8", "replace") for _, path in self.files]
        for path in self.records:
            for record in records_of(path):
                texts += [value for value in record.values() if isinstance(value, str)]
        return texts

    def _read_files(self, files: list[tuple[Path, Path]]) -> Iterator[Document]:
        names = {root: root.resolve().name for root in {root for root, _ in files}}
        for root, path in files:
            try:
                content = path.read_bytes()
            except OSError:
                continue  # not worth the end of a long run
            name = f"{names[root]}/{path.relative_to(root).as_posix()}"
            yield Document(name, content, self._licences.licence_of(root, path, content))


def _below(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    """Files with one of the endings, sorted; caches and repositories' own folders left out."""
    found = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    return [
        path
        for path in found
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts) and path.is_file()
    ]


def _shuffled(documents: Iterator[Document], order: random.Random) -> Iterator[Document]:
    held: list[Document] = []
    for document in documents:
        held.append(document)
        if len(held) >= _SHUFFLED:
            at = order.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            yield held.pop()
    order.shuffle(held)
    yield from held
