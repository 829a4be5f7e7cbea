"""Document: one text of a corpus, and the records of JSONL and parquet files as documents."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from midfill.errors import MidfillError
from midfill.training.licences import spdx_of_all

RECORD_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
"""Endings of files that hold many documents."""

_TEXT_FIELDS = ("text", "content", "code")
_LICENCE_FIELDS = ("license", "licence", "licenses", "max_stars_repo_licenses")
_NAME_FIELDS = ("path", "name", "id", "task_id")


@dataclass(frozen=True, slots=True)
class Document:
    """One text, and where it is from.

    Attributes:
        name: path or key, for the data manifest and for messages.
        content: the file's bytes; text from JSONL and parquet is encoded again.
        licence: SPDX identifier, None where nothing tells.
    """

    name: str
    content: bytes
    licence: str | None


def documents_of(path: Path) -> Iterator[Document]:
    """The records of a JSONL or parquet file, read one at a time.

    Raises:
        MidfillError: the file is broken or a record has no text.
    """
    fields = (*_TEXT_FIELDS, *_LICENCE_FIELDS, *_NAME_FIELDS)
    for number, row in enumerate(records_of(path, fields), 1):
        text = next((row[key] for key in _TEXT_FIELDS if isinstance(row.get(key), str)), None)
        if not isinstance(text, str):
            raise MidfillError(
                f"{path}: record {number} has no text; one of the fields "
                f"{', '.join(_TEXT_FIELDS)} must hold it"
            )
        name = next((str(row[key]) for key in _NAME_FIELDS if row.get(key)), str(number - 1))
        licence = next((row[key] for key in _LICENCE_FIELDS if row.get(key)), None)
        named = licence if isinstance(licence, list) else [] if licence is None else [licence]
        yield Document(
            f"{path.name}:{name}",
            text.encode("utf-8", "surrogatepass"),
            spdx_of_all([str(each) for each in named]),
        )


def records_of(path: Path, fields: Sequence[str] | None = None) -> Iterator[dict[str, object]]:
    """The records of a JSONL or parquet file as they are.

    Args:
        fields: those that are needed, where the format lets one choose; None reads all.

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
                raise MidfillError(f"{path}: line {number} is no JSON object")
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
