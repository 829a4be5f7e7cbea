"""Corpora: which files are read, and in which order."""

import json
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.training.corpus import Corpus


def write(path: Path, content: str = "x = 1\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def names(corpus: Corpus, seed: int = 0) -> list[str]:
    return [each.name for each in corpus.read(seed)]


def test_folders_give_their_files_of_the_wanted_endings(tmp_path: Path) -> None:
    for name in ("a.py", "deep/er/b.py", "c.pyi", "d.txt", "py"):
        write(tmp_path / "src" / name)
    corpus = Corpus.find([tmp_path / "src"], (".py", ".pyi"))
    assert sorted(names(corpus)) == ["src/a.py", "src/c.pyi", "src/deep/er/b.py"]


@pytest.mark.parametrize("folder", ["__pycache__", ".git", "node_modules", ".venv"])
def test_caches_and_environments_below_a_source_are_left_out(tmp_path: Path, folder: str) -> None:
    write(tmp_path / "a.py")
    write(tmp_path / "sub" / folder / "b.py")
    assert len(names(Corpus.find([tmp_path], (".py",)))) == 1


def test_a_source_may_itself_lie_in_an_environment(tmp_path: Path) -> None:
    write(tmp_path / ".venv" / "lib" / "a.py")
    assert names(Corpus.find([tmp_path / ".venv" / "lib"], (".py",))) == ["lib/a.py"]


def test_single_files_are_taken_whatever_their_ending(tmp_path: Path) -> None:
    assert names(Corpus.find([write(tmp_path / "notes.txt")], (".py",))) == [
        f"{tmp_path.name}/notes.txt"
    ]


def test_the_order_is_random_and_told_by_the_seed(tmp_path: Path) -> None:
    for number in range(50):
        write(tmp_path / f"{number:02}.py")
    corpus = Corpus.find([tmp_path], (".py",))
    assert names(corpus, 1) == names(corpus, 1) == names(Corpus.find([tmp_path], (".py",)), 1)
    assert names(corpus, 1) != names(corpus, 2)
    assert sorted(names(corpus, 1)) == sorted(names(corpus, 2))
    assert names(corpus, 1) != sorted(names(corpus, 1))


def test_files_and_records_are_mixed(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / "src" / f"{number}.py")
    lines = [json.dumps({"text": "a", "path": str(number)}) for number in range(20)]
    records = write(tmp_path / "r.jsonl", "\n".join(lines))
    order = names(Corpus.find([tmp_path / "src", records], (".py",)))
    from_records = [name.startswith("r.jsonl") for name in order]
    assert sum(from_records) == 20
    assert from_records != sorted(from_records)
    assert [name for name in order if "r.jsonl" in name] != [f"r.jsonl:{n}" for n in range(20)]


def test_a_file_that_went_away_is_left_out(tmp_path: Path) -> None:
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


def test_texts_to_protect_are_every_text_of_a_record(tmp_path: Path) -> None:
    record = {"task_id": "T/0", "prompt": "def f():", "n": 3, "solution": "return 1"}
    records = write(tmp_path / "tasks.jsonl", json.dumps(record))
    source = tmp_path / "latin.py"
    source.write_bytes("é".encode("latin-1"))
    texts = Corpus.find([records, source], (".py",)).texts()
    assert sorted(texts) == sorted(["T/0", "def f():", "return 1", "\ufffd"])
