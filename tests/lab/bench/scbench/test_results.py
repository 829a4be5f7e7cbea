"""Results: written one by one, and continued from where a run was cut off."""

from pathlib import Path

import msgspec
import pytest

from midfill.errors import MidfillError
from midfill_lab.bench.scbench.results import ResultFile, Row

ROW = Row(
    model="m",
    sample="s",
    mode="turns",
    reuse="held",
    turn=1,
    method="snapkv",
    task="kv",
    length=2000,
    number=0,
    prompt_tokens=1900,
    cached_tokens=1800,
    reused_tokens=0,
    held_slots=500,
    answer='4821"',
    score=1.0,
    guess=0.0,
    same=True,
    logprob=-0.5,
    divergence=0.1,
)
OTHER = msgspec.structs.replace(ROW, mode="requests")


def test_rows_are_found_again_by_what_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    results = ResultFile(path)
    results.add([ROW])
    results.add([OTHER])
    assert len(path.read_text().splitlines()) == 2
    again = ResultFile(path)
    assert again.find(ROW.key) == ROW
    assert again.find(OTHER.key) == OTHER
    assert again.find(ROW.key._replace(model="n")) is None


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ResultFile(path).add([ROW, OTHER])
    path.write_bytes(path.read_bytes()[:-20])
    results = ResultFile(path)
    assert results.find(ROW.key) == ROW
    assert results.find(OTHER.key) is None
    results.add([OTHER])
    assert ResultFile(path).find(OTHER.key) == OTHER


def test_without_a_file_rows_are_kept_in_memory() -> None:
    results = ResultFile(None)
    results.add([ROW])
    assert results.find(ROW.key) == ROW


def test_another_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"loss": 1}\n')
    with pytest.raises(MidfillError, match=r"other\.jsonl, line 1: no result of bench scbench"):
        ResultFile(path)
    with pytest.raises(MidfillError, match="can't be read"):
        ResultFile(tmp_path)
