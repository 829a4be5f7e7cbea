"""Records of JSONL and parquet files become documents; broken files are named."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from midfill.errors import MidfillError
from midfill.training.documents import Document, documents_of


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("field", ["text", "content", "code"])
def test_a_record_is_a_document(tmp_path: Path, field: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {field: "x = 'é'\n", "path": "a.py", "license": "mit"})
    assert list(documents_of(path)) == [Document("d.jsonl:a.py", "x = 'é'\n".encode(), "MIT")]


def test_records_without_a_name_are_numbered_from_0(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"text": "a"}, {"text": "b"})
    assert [each.name for each in documents_of(path)] == ["d.jsonl:0", "d.jsonl:1"]


@pytest.mark.parametrize(
    ("value", "licence"),
    [
        ("Apache License 2.0", "Apache-2.0"),
        (["MIT"], "MIT"),
        (["MIT", "GPL-2.0"], "GPL-3.0"),
        (["MIT", "something of our own"], None),
        ([], None),
        (None, None),
        ("something of our own", None),
    ],
)
def test_the_least_permissive_of_several_licences_counts(
    tmp_path: Path, value: object, licence: str | None
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"text": "a", "license": value})
    assert [each.licence for each in documents_of(path)] == [licence]


def test_gzip_is_unpacked_and_empty_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"text": "a"}\n\n{"text": "b"}\n'))
    assert [each.content for each in documents_of(path)] == [b"a", b"b"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    table = {
        "content": ["a", "b"],
        "path": ["x.py", "y.py"],
        "licenses": [["MIT"], []],
    }
    parquet.write_table(pyarrow.table(table), path)
    assert list(documents_of(path)) == [
        Document("d.parquet:x.py", b"a", "MIT"),
        Document("d.parquet:y.py", b"b", None),
    ]


def test_half_a_surrogate_pair_is_handed_on_for_the_filter_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "\\ud800"}\n')
    (document,) = documents_of(path)
    with pytest.raises(UnicodeDecodeError):
        document.content.decode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("d.jsonl", b'{"text": "\xff"}\n', "line 1 is not JSON"),
        ("d.jsonl", b"[1, 2]\n", "line 1 is no JSON object"),
        ("d.jsonl", b'{"prompt": "a"}\n', "record 1 has no text; one of the fields text"),
        ("d.jsonl", b'{"text": 7}\n', "record 1 has no text"),
        ("d.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("d.jsonl.gz", b"no gzip at all", "can't be read"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:40], "can't be read"),
        ("d.parquet", b"PAR1 no parquet", "not a parquet file"),
        ("d.parquet", b"", "not a parquet file"),
    ],
)
def test_a_broken_file_is_named_in_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(MidfillError) as caught:
        list(documents_of(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["some text"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(MidfillError, match="not a parquet file"):
        list(documents_of(path))
