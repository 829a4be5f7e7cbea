"""Corpus: the files that training documents are read from, and the order they are read in.

The manifest lists which documents a run was trained on, under which licence, from which package.
"""

import gzip
import hashlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError
from midfill_lab.training.licences import LicenceFinder, spdx_of_all

PACKAGE_RECORD = "midfill-package.json"
"""File in a fetched package's folder whose "requirement" is the package's name and version."""

RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
"""Suffixes of files that hold many documents."""

_TEXT_FIELDS = ("text", "content", "code")
_LICENCE_FIELDS = ("license", "licence", "licenses", "max_stars_repo_licenses")
_NAME_FIELDS = ("path", "name", "id", "task_id")
_PACKAGE_FIELD = "package"
_SKIPPED_FOLDERS = frozenset({"__pycache__", ".git", ".hg", "node_modules", ".venv"})
_SHUFFLE_BUFFER = 4096  # records held while a file that is read in order is shuffled


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its origin.

    Attributes:
        name: path or key, for the data manifest and for messages.
        content: the file's bytes; text from JSONL and parquet is encoded as UTF-8.
        licence: SPDX identifier; None where it is unknown.
        package: name and version of its package, which a file ``PACKAGE_RECORD`` names in the
            folder below its root, or a record in its field "package"; None otherwise.
    """

    name: str
    content: bytes
    licence: str | None
    package: str | None = None


@dataclass(frozen=True)
class Corpus:
    """The sources of documents.

    Attributes:
        files: (root, file) pairs of text files. Names are relative to the root, and the search
            for a file's licence stops there.
        records: JSONL and parquet files.
        shares: weight of each suffix among the files that are read, as long as there are files of
            all. Empty for as many as there are.
    """

    files: tuple[tuple[Path, Path], ...]
    records: tuple[Path, ...]
    shares: Mapping[str, float] = field(default_factory=dict)
    _licences: LicenceFinder = field(default_factory=LicenceFinder, compare=False, repr=False)

    @classmethod
    def find(
        cls, sources: Iterable[Path], suffixes: Sequence[str], shares: Sequence[float] = ()
    ) -> "Corpus":
        """Find the files of some sources.

        Args:
            sources: folders, ``.jsonl``, ``.jsonl.gz`` and ``.parquet`` files, or text files.
            suffixes: suffixes of the files to take from folders, such as ".py".
            shares: weights of the suffixes, see ``Corpus``; one each, or none.

        Raises:
            MidfillError: a source is missing, or there is nothing to read.
        """
        files: list[tuple[Path, Path]] = []
        records: list[Path] = []
        for source in sources:
            if source.is_dir():
                files += [(source, path) for path in _find_files(source, frozenset(suffixes))]
            elif not source.is_file():
                raise MidfillError(f"{source}: no such file or folder")
            elif source.name.endswith(RECORD_SUFFIXES):
                records.append(source)
            else:
                files.append((source.parent, source))
        if not files and not records:
            raise MidfillError(
                f"no documents: the folders hold no {' or '.join(suffixes)} file; set other "
                "suffixes in the recipe, and name "
                f"{', '.join(RECORD_SUFFIXES)} files one by one"
            )
        weights = dict(zip(suffixes, shares, strict=True)) if shares else {}
        return cls(tuple(files), tuple(records), weights)

    def read(self, seed: int) -> Iterator[Document]:
        """Read the documents in random order, one at a time.

        Files are shuffled over all folders, records among their neighbours. Both kinds are
        interleaved in proportion to their number, files of several suffixes by ``shares``. Files
        that have become unreadable are skipped.

        Args:
            seed: of the order; the same seed gives the same order.

        Raises:
            MidfillError: a file of records is broken.
        """
        order = random.Random(seed)
        files = list(self.files)
        order.shuffle(files)
        streams = [_shuffle(read_record_documents(path), order) for path in self.records]
        weights = [1.0] * len(streams)
        for some, weight in self._groups(files):
            streams.append(self._read_files(some))
            weights.append(weight)
        while streams:
            at = order.choices(range(len(streams)), weights)[0]
            document = next(streams[at], None)
            if document is None:
                del streams[at], weights[at]
            else:
                yield document

    def _groups(
        self, files: list[tuple[Path, Path]]
    ) -> Iterator[tuple[list[tuple[Path, Path]], float]]:
        """Yield the files that are read in one order, and their weight beside a file of records."""
        if not files:
            return
        weight = max(1.0, len(files) / 1000)
        if not self.shares:
            yield files, weight
            return
        least = min(self.shares.values())  # of files that are named one by one
        shares = {path.suffix: self.shares.get(path.suffix, least) for _, path in files}
        for suffix, share in sorted(shares.items()):
            some = [each for each in files if each[1].suffix == suffix]
            yield some, weight * share / sum(shares.values())

    def texts(self) -> list[str]:
        """Return all documents as text; of a record, every field that is text.

        Bytes that are not UTF-8 become replacement characters.
        """
        texts = [path.read_text("utf-8", "replace") for _, path in self.files]
        for path in self.records:
            for record in read_records(path):
                texts += [value for value in record.values() if isinstance(value, str)]
        return texts

    def _read_files(self, files: list[tuple[Path, Path]]) -> Iterator[Document]:
        names = {root: root.resolve().name for root in {root for root, _ in files}}
        packages: dict[Path, str | None] = {}
        for root, path in files:
            try:
                content = path.read_bytes()
            except OSError:
                continue  # one file is not worth ending a long run
            inside = path.relative_to(root)
            folder = root / inside.parts[0]
            if folder not in packages:
                packages[folder] = _read_package(folder)
            licence = self._licences.licence_of(root, path, content)
            name = f"{names[root]}/{inside.as_posix()}"
            yield Document(name, content, licence, packages[folder])


def _read_package(folder: Path) -> str | None:
    """Return name and version of the package that was fetched into a folder, None if none was."""
    try:
        return str(json.loads((folder / PACKAGE_RECORD).read_bytes())["requirement"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def read_record_documents(path: Path) -> Iterator[Document]:
    """Read the records of a JSONL or parquet file as documents, one at a time.

    Raises:
        MidfillError: the file is broken or a record has no text.
    """
    fields = (*_TEXT_FIELDS, *_LICENCE_FIELDS, *_NAME_FIELDS, _PACKAGE_FIELD)
    for number, row in enumerate(read_records(path, fields), 1):
        text = next((row[key] for key in _TEXT_FIELDS if isinstance(row.get(key), str)), None)
        if not isinstance(text, str):
            raise MidfillError(
                f"{path}: record {number} has no text; it must be in one of the fields "
                f"{', '.join(_TEXT_FIELDS)}"
            )
        name = next((str(row[key]) for key in _NAME_FIELDS if row.get(key)), str(number - 1))
        licence = next((row[key] for key in _LICENCE_FIELDS if row.get(key)), None)
        named = licence if isinstance(licence, list) else [] if licence is None else [licence]
        package = row.get(_PACKAGE_FIELD)
        yield Document(
            f"{path.name}:{name}",
            text.encode("utf-8", "surrogatepass"),
            spdx_of_all([str(each) for each in named]),
            package if isinstance(package, str) else None,
        )


def read_records(path: Path, fields: Sequence[str] | None = None) -> Iterator[dict[str, object]]:
    """Read the records of a JSONL or parquet file, one at a time.

    Args:
        path: the file.
        fields: the fields to read, where the format allows choosing; None reads all.

    Raises:
        MidfillError: the file is missing or broken.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path, fields)
        else:
            yield from _jsonl_rows(path)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise MidfillError(f"{path}: can't be read: {reason}") from None


def _jsonl_rows(path: Path) -> Iterator[dict[str, object]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MidfillError(f"{path}: line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise MidfillError(f"{path}: line {number} is not a JSON object")
            yield row


def _parquet_rows(path: Path, fields: Sequence[str] | None) -> Iterator[dict[str, object]]:
    try:
        from pyarrow.lib import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MidfillError(
            f"{path}: reading parquet needs pyarrow; install it with: pip install pyarrow"
        ) from None
    try:
        with ParquetFile(path) as table:
            names = table.schema_arrow.names
            columns = [name for name in names if fields is None or name in fields]
            for batch in table.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except ArrowException as error:
        first_line = str(error).partition("\n")[0]
        raise MidfillError(f"{path}: not a parquet file: {first_line}") from None


def _find_files(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    """Return the files with one of the suffixes, sorted, without caches and repository data."""
    found = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    return [
        path
        for path in found
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts) and path.is_file()
    ]


def _shuffle(documents: Iterator[Document], order: random.Random) -> Iterator[Document]:
    held: list[Document] = []
    for document in documents:
        held.append(document)
        if len(held) >= _SHUFFLE_BUFFER:
            at = order.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            yield held.pop()
    order.shuffle(held)
    yield from held


MANIFEST = "manifest.jsonl"
"""Name of the file in a run's folder."""


@dataclass(frozen=True, slots=True, order=True)
class ManifestEntry:
    """One document.

    Attributes:
        name: its path in its source.
        sha256: of its content.
        licence: SPDX identifier; None where it is unknown.
        package: name and version of the package it is from, such as "attrs==25.4.0"; None if it is
            from none that was fetched by name and version.
    """

    name: str
    sha256: str
    licence: str | None = None
    package: str | None = None


def manifest_text(entries: Iterable[ManifestEntry]) -> str:
    """Return the manifest's content: one JSON object per line, sorted by name."""
    return "".join(json.dumps(asdict(entry)) + "\n" for entry in sorted(entries, key=_order))


def describe_manifest(entries: Iterable[ManifestEntry]) -> dict[str, Any]:
    """Return what a model card says of the documents.

    Licences are counted, the most frequent first. Sources are packages, or folders directly below
    the sources.
    """
    entries = list(entries)
    licences = Counter(entry.licence or "unknown" for entry in entries)
    sources = {entry.package or _folder(entry.name) for entry in entries} - {""}
    return {
        "documents": len(entries),
        "licences": dict(licences.most_common()),
        "sources": ", ".join(sorted(sources, key=str.lower)),
        "manifest_sha256": hashlib.sha256(manifest_text(entries).encode()).hexdigest(),
    }


def _folder(name: str) -> str:
    return name.split("/")[1] if name.count("/") > 1 else ""


def _order(entry: ManifestEntry) -> tuple[Any, ...]:
    return entry.name, entry.sha256
