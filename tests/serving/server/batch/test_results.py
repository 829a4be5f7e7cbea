"""Results: whole rows alone, whatever interrupts them."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.errors import MidfillError
from midfill.serving.server.batch.results import ResultFile
from midfill.serving.server.batch.rows import RowError, RowResponse, RowResult

ERROR = RowError(code="invalid_row", message="é")


def result(number: int, status: int = 200) -> RowResult:
    body = msgspec.Raw(b'{"text":"' + b"a" * number + b'"}')
    response = RowResponse(status_code=status, request_id="req_1", body=body)
    return RowResult(id=f"batch_req_{number}_ab", custom_id=f"row {number}", response=response)


def lines(*results: RowResult) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in results)


def test_results_are_appended_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultFile(path)
    results.check_belongs(set())
    broken = RowResult(id="batch_req_3_ab", custom_id=None, error=ERROR)
    for each in (result(1), result(2, 400), broken):
        results.append(each)
    assert (len(results.done), results.failed) == (3, 2)
    results.close()
    assert path.read_bytes() == lines(result(1), result(2, 400), broken)
    assert list(tmp_path.iterdir()) == [path]

    again = ResultFile(path)
    assert (len(again.done), again.failed) == (3, 2)
    again.close()


@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_goes_on_after_its_last_whole_row(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    rows = [result(number) for number in range(4)]
    whole = lines(*rows)
    path.write_bytes(whole[:cut])
    results = ResultFile(path)
    results.check_belongs([row.id for row in rows])
    kept = len(results.done)
    assert path.read_bytes() == lines(*rows[:kept])
    assert len(lines(*rows[: kept + 1])) > min(cut, len(whole)) or kept == 4
    for row in rows[kept:]:
        results.append(row)
    results.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", lines(result(1)) + b'{"id":1}\n'])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(MidfillError, match="is no result of a batch"):
        ResultFile(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_results_of_another_batch_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = lines(result(1)) + b'{"id":"batch_req_2'
    path.write_bytes(content)
    results = ResultFile(path)
    with pytest.raises(MidfillError, match="results of other rows"):
        results.check_belongs(["batch_req_1_other"])
    results.close()
    assert path.read_bytes() == content


def test_a_full_disk_takes_back_what_it_has_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultFile(path)
    results.check_belongs(set())
    results.append(result(1))
    write, calls = os.write, []

    def full(handle: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[:10])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(MidfillError, match=r"No space left on device; its 1 rows stay"):
        results.append(result(2))
    monkeypatch.undo()
    assert path.read_bytes() == lines(result(1))
    results.append(result(2))
    results.close()
    assert path.read_bytes() == lines(result(1), result(2))


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = ResultFile(path)
    with pytest.raises(MidfillError, match="another process is writing it"):
        ResultFile(path)
    first.close()
    ResultFile(path).close()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match="can't be written: No such file or directory"):
        ResultFile(tmp_path / "none" / "out.jsonl")
    with pytest.raises(MidfillError, match="can't be written: Is a directory"):
        ResultFile(tmp_path)


def test_a_file_may_be_closed_on_another_thread(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(ResultFile(path).close).result()
