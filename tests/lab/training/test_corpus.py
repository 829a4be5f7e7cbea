"""Corpora: which files and records are read, in which order, and how broken files are reported."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from midfill.errors import MidfillError
from midfill_lab.training.corpus import PACKAGE_RECORD, Corpus, Document, read_record_documents


def write(path: Path, content: str = "x = 1\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def names(corpus: Corpus, seed: int = 0) -> list[str]:
    return [each.name for each in corpus.read(seed)]


def test_folders_are_searched_for_the_suffixes(tmp_path: Path) -> None:
    for name in ("a.py", "deep/er/b.py", "c.pyi", "d.txt", "py"):
        write(tmp_path / "src" / name)
    corpus = Corpus.find([tmp_path / "src"], (".py", ".pyi"))
    assert sorted(names(corpus)) == ["src/a.py", "src/c.pyi", "src/deep/er/b.py"]


@pytest.mark.parametrize("folder", ["__pycache__", ".git", "node_modules", ".venv"])
def test_caches_and_environments_below_a_source_are_skipped(tmp_path: Path, folder: str) -> None:
    write(tmp_path / "a.py")
    write(tmp_path / "sub" / folder / "b.py")
    assert len(names(Corpus.find([tmp_path], (".py",)))) == 1


def test_a_source_may_be_inside_an_environment(tmp_path: Path) -> None:
    write(tmp_path / ".venv" / "lib" / "a.py")
    assert names(Corpus.find([tmp_path / ".venv" / "lib"], (".py",))) == ["lib/a.py"]


def test_single_files_are_read_whatever_their_suffix(tmp_path: Path) -> None:
    assert names(Corpus.find([write(tmp_path / "notes.txt")], (".py",))) == [
        f"{tmp_path.name}/notes.txt"
    ]


def test_the_seed_determines_the_random_order(tmp_path: Path) -> None:
    for number in range(50):
        write(tmp_path / f"{number:02}.py")
    corpus = Corpus.find([tmp_path], (".py",))
    assert names(corpus, 1) == names(corpus, 1) == names(Corpus.find([tmp_path], (".py",)), 1)
    assert names(corpus, 1) != names(corpus, 2)
    assert sorted(names(corpus, 1)) == sorted(names(corpus, 2))
    assert names(corpus, 1) != sorted(names(corpus, 1))


def test_files_and_records_are_interleaved(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / "src" / f"{number}.py")
    lines = [json.dumps({"text": "a", "path": str(number)}) for number in range(20)]
    records = write(tmp_path / "r.jsonl", "\n".join(lines))
    order = names(Corpus.find([tmp_path / "src", records], (".py",)))
    from_records = [name.startswith("r.jsonl") for name in order]
    assert sum(from_records) == 20
    assert from_records != sorted(from_records)
    assert [name for name in order if "r.jsonl" in name] != [f"r.jsonl:{n}" for n in range(20)]


def test_suffixes_have_their_share_while_there_are_files_of_all(tmp_path: Path) -> None:
    for number in range(400):
        write(tmp_path / "src" / f"{number}.py")
    for number in range(40):
        write(tmp_path / "src" / f"{number}.go")
    corpus = Corpus.find([tmp_path / "src"], (".py", ".go"), (0.5, 0.5))
    order = names(corpus)
    assert order == names(corpus)
    assert len(set(order)) == 440
    assert 10 < sum(name.endswith(".go") for name in order[:40]) < 30
    assert all(name.endswith(".py") for name in order[200:])


def test_a_file_that_was_removed_is_skipped(tmp_path: Path) -> None:
    gone = write(tmp_path / "gone.py")
    write(tmp_path / "stays.py")
    corpus = Corpus.find([tmp_path], (".py",))
    gone.unlink()
    assert names(corpus) == [f"{tmp_path.name}/stays.py"]


@pytest.mark.parametrize("name", ["nothing", "nothing.jsonl", "nothing.parquet", "nothing.py"])
def test_a_missing_source_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(MidfillError, match=rf"{name}: no such file or folder"):
        Corpus.find([tmp_path / name], (".py",))


def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    with pytest.raises(MidfillError, match=r"no documents: the folders hold no .py file"):
        Corpus.find([tmp_path], (".py",))


def test_the_texts_of_a_record_are_all_its_string_fields(tmp_path: Path) -> None:
    record = {"task_id": "T/0", "prompt": "def f():", "n": 3, "solution": "return 1"}
    records = write(tmp_path / "tasks.jsonl", json.dumps(record))
    source = tmp_path / "latin.py"
    source.write_bytes("é".encode("latin-1"))
    texts = Corpus.find([records, source], (".py",)).texts()
    assert sorted(texts) == sorted(["T/0", "def f():", "return 1", "\ufffd"])


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("field", ["text", "content", "code"])
def test_a_record_is_a_document(tmp_path: Path, field: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {field: "x = 'é'\n", "path": "a.py", "license": "mit"})
    assert list(read_record_documents(path)) == [
        Document("d.jsonl:a.py", "x = 'é'\n".encode(), "MIT")
    ]


def test_a_record_may_name_its_package(tmp_path: Path) -> None:
    records = [{"text": "a", "package": each} for each in ("attrs==25.4.0", None, 3)]
    path = write_jsonl(tmp_path / "d.jsonl", *records)
    packages = [each.package for each in read_record_documents(path)]
    assert packages == ["attrs==25.4.0", None, None]


def test_records_without_a_name_are_numbered_from_0(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"text": "a"}, {"text": "b"})
    assert [each.name for each in read_record_documents(path)] == ["d.jsonl:0", "d.jsonl:1"]


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
    assert [each.licence for each in read_record_documents(path)] == [licence]


def test_gzip_is_decompressed_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b'\n{"text": "a"}\n\n{"text": "b"}\n'))
    assert [each.content for each in read_record_documents(path)] == [b"a", b"b"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    table = {
        "content": ["a", "b"],
        "path": ["x.py", "y.py"],
        "licenses": [["MIT"], []],
    }
    parquet.write_table(pyarrow.table(table), path)
    assert list(read_record_documents(path)) == [
        Document("d.parquet:x.py", b"a", "MIT"),
        Document("d.parquet:y.py", b"b", None),
    ]


def test_a_lone_surrogate_is_kept_for_the_filter_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "\\ud800"}\n')
    (document,) = read_record_documents(path)
    with pytest.raises(UnicodeDecodeError):
        document.content.decode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("d.jsonl", b'{"text": "\xff"}\n', "line 1 is not JSON"),
        ("d.jsonl", b"[1, 2]\n", "line 1 is not a JSON object"),
        (
            "d.jsonl",
            b'{"prompt": "a"}\n',
            "record 1 has no text; it must be in one of the fields text",
        ),
        ("d.jsonl", b'{"text": 7}\n', "record 1 has no text"),
        ("d.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("d.jsonl.gz", b"no gzip at all", "can't be read"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:40], "can't be read"),
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
        list(read_record_documents(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"text": ["some text"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(MidfillError, match="not a parquet file"):
        list(read_record_documents(path))


@pytest.mark.parametrize(
    ("record", "package"),
    [
        ('{"requirement": "attrs==25.4.0"}', "attrs==25.4.0"),
        ("{}", None),
        ("[1", None),
        ("3", None),
    ],
)
def test_a_document_knows_the_package_it_was_fetched_with(
    tmp_path: Path, record: str, package: str | None
) -> None:
    (tmp_path / "fetched").mkdir()
    (tmp_path / "fetched" / PACKAGE_RECORD).write_text(record)
    (tmp_path / "fetched" / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_text("b = 1\n")
    found = {
        document.name: document.package for document in Corpus.find([tmp_path], [".py"]).read(0)
    }
    assert found == {f"{tmp_path.name}/fetched/a.py": package, f"{tmp_path.name}/b.py": None}
