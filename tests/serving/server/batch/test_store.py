"""BatchStore: what is on disk is what there is, within bounds, each tenant's for itself."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from midfill.errors import MidfillError
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.batch.rows import RowResponse, RowResult
from midfill.serving.server.batch.store import (
    BatchObject,
    BatchStore,
    FileObject,
    TenantBatches,
    split_results,
)
from midfill.serving.server.responses import ApiError


def store(folder: Path, keys: KeyRing | None = None) -> BatchStore:
    return BatchStore(folder, 1000, 3, (keys or KeyRing()).identity)


def add(stored: TenantBatches, content: bytes) -> FileObject:
    path = stored.begin_file()
    path.write_bytes(content)
    return asyncio.run(stored.add_file(path, "in.jsonl", "batch"))


def batch(name: str, created_at: int = 1) -> BatchObject:
    return BatchObject(
        id=name, endpoint="/v1/completions", input_file_id="file-1", completion_window="24h",
        created_at=created_at,
    )  # fmt: skip


def test_what_is_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    first = store(tmp_path)
    file = add(first.of(""), b"content")
    running = batch("batch_1")
    running.enter("in_progress")
    asyncio.run(first.of("").save(running))
    left = first.of("").begin_file()
    left.write_bytes(b"half an upload")
    first.close()

    again = store(tmp_path)
    stored = again.of("")
    assert stored.files == {file.id: file}
    assert stored.content(file.id).read_bytes() == b"content"
    assert stored.batches == {"batch_1": running}
    assert [each[2].id for each in again.unfinished()] == ["batch_1"]
    assert not left.exists()
    again.close()


def test_a_damaged_entry_is_left_out(tmp_path: Path) -> None:
    first = store(tmp_path)
    file = add(first.of(""), b"content")
    (first.of("").folder / "files" / "file-x.json").write_bytes(b"\xff{")
    first.close()
    assert list(store(tmp_path).of("").files) == [file.id]


def test_two_servers_never_have_one_folder(tmp_path: Path) -> None:
    first = store(tmp_path)
    with pytest.raises(MidfillError, match="another server keeps its batches there"):
        store(tmp_path)
    first.close()
    store(tmp_path).close()


def test_another_keys_tenant_of_the_same_name_gets_nothing(tmp_path: Path) -> None:
    first = store(tmp_path, KeyRing(["one", "two"]))
    add(first.of("key-1"), b"of one")
    assert not first.of("key-2").files
    first.close()
    swapped = store(tmp_path, KeyRing(["two", "one"]))
    assert not swapped.of("key-1").files
    assert len(swapped.of("key-2").files) == 1
    swapped.close()


def test_bytes_and_files_are_bounded(tmp_path: Path) -> None:
    opened = store(tmp_path)
    stored = opened.of("")
    add(stored, b"x" * 600)
    stored.reserve(300)
    with pytest.raises(ApiError):
        stored.reserve(101)
    stored.reserve(-300)
    stored.reserve(400)
    stored.reserve(-400)
    running = batch("batch_1")
    asyncio.run(stored.save(running))
    stored.results("batch_1").write_bytes(b"x" * 300)
    assert stored.free_bytes == 100
    add(stored, b"x")
    add(stored, b"x")
    with pytest.raises(ApiError) as caught:
        stored.begin_file()
    assert caught.value.code == "too_many_files"
    stored.delete_file(next(iter(stored.files)))
    stored.begin_file()
    opened.close()


def test_the_oldest_finished_batches_are_forgotten(tmp_path: Path) -> None:
    opened = store(tmp_path)
    stored = opened.of("")
    asyncio.run(stored.save(batch("running")))
    for number in range(5):
        done = batch(f"batch_{number}", number)
        done.enter("completed")
        asyncio.run(stored.save(done))
    assert list(stored.batches) == ["running", "batch_2", "batch_3", "batch_4"]
    names = {path.stem for path in (stored.folder / "batches").glob("*.json")}
    assert names == set(stored.batches)
    opened.close()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MidfillError, match="file"):
        store(tmp_path / "file")


@pytest.mark.parametrize("statuses", [[200, 400, None], [200], [None], []])
def test_results_are_split_by_what_they_are(tmp_path: Path, statuses: list[int | None]) -> None:
    def response(status: int) -> RowResponse:
        return RowResponse(status_code=status, request_id="r", body=msgspec.Raw(b"{}"))

    rows = [
        RowResult(
            id=str(number), custom_id=None, response=None if status is None else response(status)
        )
        for number, status in enumerate(statuses)
    ]
    results, good, bad = (tmp_path / name for name in ("results", "good", "bad"))
    results.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    found = split_results(results, good, bad)
    assert found == (200 in statuses, any(status != 200 for status in statuses))
    assert (good.exists(), bad.exists()) == found
    both = "".join(path.read_text() for path in (good, bad) if path.exists())
    assert sorted(both.splitlines()) == results.read_text().splitlines()
