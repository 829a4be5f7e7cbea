"""BatchJob: each row has one result, whatever ends a run, and runs when there is room for it."""

import asyncio
import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midfill.errors import MidfillError
from midfill.serving.server.batch.job import (
    Answered,
    BatchJob,
    BatchProgress,
    OutputLengths,
    PlannedPrompt,
    RowKind,
)
from midfill.serving.server.batch.results import ResultFile
from midfill.serving.server.batch.row_budget import RowBudget
from midfill.serving.server.batch.rows import RowFile


class StubApi:
    """Answers rows whose body says what they cost: {"tokens": [...], "output": 3}.

    Attributes:
        asked: the custom ids in the order in which they were asked.
        most: what the rows in progress held at most, prefixes counted for each.
        running: how many rows are in progress.
    """

    def __init__(self, statuses: Sequence[int] = ()) -> None:
        self.statuses = list(statuses)
        self.asked: list[str] = []
        self.running = self.most_running = self.used = self.most_used = 0
        self.on_answer: Callable[[], None] = lambda: None

    async def plan(self, url: str, body: bytes) -> PlannedPrompt | Answered:
        fields = json.loads(body)
        if "tokens" not in fields:
            return Answered(400, b'{"error":{}}')
        tokens = np.array(fields["tokens"], np.int32)
        return PlannedPrompt(tokens, len(tokens), fields.get("output", 2))

    async def answer(self, url: str, body: bytes) -> Answered:
        fields = json.loads(body)
        self.asked.append(fields["name"])
        size = len(fields["tokens"]) + fields.get("output", 2)
        self.running, self.used = self.running + 1, self.used + size
        self.most_running = max(self.most_running, self.running)
        self.most_used = max(self.most_used, self.used)
        for _ in range(3):
            await asyncio.sleep(0)
        self.running, self.used = self.running - 1, self.used - size
        self.on_answer()
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return Answered(status, b'{"error":{}}', 0.0)
        usage = {"prompt_tokens": len(fields["tokens"]), "completion_tokens": 2}
        return Answered(200, json.dumps({"name": fields["name"], "usage": usage}).encode())


class StoppedError(Exception):
    """What ends a run at any moment."""


def row(name: str, tokens: Sequence[int], **fields: object) -> dict[str, Any]:
    body = {"name": name, "tokens": list(tokens), **fields}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


class Batch:
    """A batch in files."""

    def __init__(self, folder: Path, rows: Sequence[object]) -> None:
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.source.write_text("".join(json.dumps(each) + "\n" for each in rows))

    def run(
        self, api: StubApi, slots: int = 1000, seen: list[BatchProgress] | None = None
    ) -> BatchProgress:
        source, results = RowFile(self.source, 10_000), ResultFile(self.output)
        report = (lambda progress: None) if seen is None else seen.append
        try:
            return asyncio.run(BatchJob(source, results, api, RowBudget(slots), report).run())
        finally:
            source.close()
            results.close()

    def results(self) -> dict[str, dict[str, Any]]:
        rows = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({each["id"] for each in rows}) == len(rows)
        return {each["custom_id"]: each for each in rows}


def test_every_row_gets_its_own_answer(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [row(f"row {number}", [number, 1]) for number in range(30)])
    done = batch.run(StubApi())
    assert (done.rows, done.done, done.failed) == (30, 30, 0)
    assert (done.prompt_tokens, done.output_tokens) == (60, 60)
    for name, result in batch.results().items():
        assert result["response"]["body"]["name"] == name
        assert result["response"]["status_code"] == 200
        assert result["error"] is None


def test_rows_with_errors_have_one_result_each_and_stop_nothing(tmp_path: Path) -> None:
    rows = [
        row("a", [1]),
        row("a", [2]),
        {"custom_id": "b", "method": "POST", "url": "/v1/nothing", "body": {}},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {}},
        {"custom_id": "d"},
        row("e", [3]),
    ]
    batch = Batch(tmp_path, rows)
    api = StubApi()
    done = batch.run(api)
    assert (done.rows, done.done, done.failed) == (6, 6, 4)
    assert sorted(api.asked) == ["a", "e"]
    results = [json.loads(line) for line in batch.output.read_text().splitlines()]
    codes = Counter(each["error"]["code"] for each in results if each["error"])
    assert codes == {"duplicate_custom_id": 1, "invalid_url": 1, "invalid_row": 1}
    statuses = {each["custom_id"]: each["response"]["status_code"] for each in results
                if each["response"]}  # fmt: skip
    assert statuses == {"a": 200, "c": 400, "e": 200}


def test_nothing_to_do_is_done_at_once(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [])
    done = batch.run(StubApi())
    assert (done.rows, done.done) == (0, 0)
    assert batch.output.read_bytes() == b""


def test_members_of_a_group_are_asked_together(tmp_path: Path) -> None:
    shared = list(range(10))
    rows = [
        row(f"{'ab'[number % 2]}{number}", [number % 2, *shared, 50 + number], output=1)
        for number in range(12)
    ]
    rows.insert(5, row("long answer", [7, 8], output=40))
    api = StubApi()
    Batch(tmp_path, rows).run(api)
    assert api.asked[0] == "long answer"
    groups = [name[0] for name in api.asked[1:]]
    assert groups == ["a"] * 6 + ["b"] * 6


@pytest.mark.parametrize("slots", [1, 20, 60, 200])
def test_memory_bounds_the_rows_in_progress(tmp_path: Path, slots: int) -> None:
    rows = [row(f"row {number}", [100 + number] * 8, output=2) for number in range(40)]
    api = StubApi()
    done = Batch(tmp_path, rows).run(api, slots)
    assert done.done == 40
    assert api.most_used <= max(0.95 * slots, 10)
    assert api.most_running == max(int(0.95 * slots / 10), 1)


def test_rows_in_progress_may_be_bounded_by_number_too(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [row(f"row {number}", [number, 1]) for number in range(20)])
    source, results, api = RowFile(batch.source, 10_000), ResultFile(batch.output), StubApi()
    asyncio.run(BatchJob(source, results, api, RowBudget(1000, max_rows=3)).run())
    source.close()
    results.close()
    assert (len(results.done), api.most_running) == (20, 3)


def test_a_shared_prefix_counts_once(tmp_path: Path) -> None:
    rows = [row(f"row {number}", [*range(100), 200 + number], output=1) for number in range(10)]
    api = StubApi()
    Batch(tmp_path, rows).run(api, slots=132)  # 125 of them: 100 and 10 times 2
    assert api.most_running == 10


def test_a_run_that_is_stopped_is_gone_on_with(tmp_path: Path) -> None:
    rows = [row(f"row {number}", [number, 1]) for number in range(20)]
    batch = Batch(tmp_path, rows)
    asked: Counter[str] = Counter()
    for stop_after in (3, 1, 7, 100):
        api = StubApi()

        def stop(api: StubApi = api, stop_after: int = stop_after) -> None:
            if len(batch.output.read_bytes().splitlines()) >= stop_after:
                raise StoppedError

        api.on_answer = stop if stop_after < 100 else (lambda: None)
        try:
            batch.run(api, slots=4)
        except StoppedError:
            with batch.output.open("ab") as file:
                file.write(b'{"id":"batch_req_')
        asked.update(api.asked)
    results = batch.results()
    assert sorted(results) == sorted(each["custom_id"] for each in rows)
    assert set(asked.values()) <= {1, 2, 3}  # asked again: those in progress at a stop
    assert sum(asked.values()) <= 20 + 3


def test_a_duplicate_stays_one_after_an_interruption(tmp_path: Path) -> None:
    rows = [row("a", [1]), row("a", [2]), row("b", [3])]
    batch = Batch(tmp_path, rows)
    batch.run(StubApi())
    whole = batch.output.read_bytes()
    for keep in range(4):
        batch.output.write_bytes(b"".join(whole.splitlines(keepends=True)[:keep]))
        batch.run(StubApi())
        assert sorted(batch.output.read_text().count(name) for name in ("_1_", "_2_", "_3_")) == [
            1, 1, 1,
        ]  # fmt: skip


def test_an_engine_that_restarts_is_asked_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [row("a", [1])])
    done = batch.run(StubApi([503, 429, 503, 200]))
    assert (done.done, done.failed) == (1, 0)


def test_a_row_that_always_meets_no_engine_is_an_error(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [row("a", [1]), row("b", [2])])
    done = batch.run(StubApi([503] * 6 + [200]), slots=1)
    assert (done.done, done.failed) == (2, 1)


def test_results_that_cannot_be_written_end_the_run_and_the_rows_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(tmp_path, [row(f"row {number}", [number, 1]) for number in range(20)])
    write, calls = os.write, []

    def full(handle: int, data: memoryview) -> int:
        calls.append(data)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(MidfillError, match="No space left on device; its 5 rows stay"):
        batch.run(StubApi(), slots=12)
    monkeypatch.undo()
    api = StubApi()
    assert batch.run(api).done == 20
    assert len(api.asked) == 15


def test_progress_tells_speed_and_time_left(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [row(f"row {number}", [number, 1]) for number in range(10)])
    seconds = iter(range(10_000))
    seen: list[BatchProgress] = []
    source, results = RowFile(batch.source, 10_000), ResultFile(batch.output)
    budget, clock = RowBudget(4), lambda: float(next(seconds))
    job = BatchJob(source, results, StubApi(), budget, seen.append, clock=clock)
    asyncio.run(job.run())
    source.close()
    results.close()
    answering = [each for each in seen if each.stage == "answering"]
    left = [each.seconds_left for each in answering]
    assert [each.done for each in answering] == list(range(1, 11))
    assert all(each.tokens_per_second > 0 for each in answering)
    assert left[-1] == 0
    assert all(each is not None for each in left)


def test_answers_are_expected_to_be_as_long_as_those_before() -> None:
    lengths, kind, other = OutputLengths(), RowKind("/v1/completions", 100), RowKind("x", 100)
    assert lengths.expected(kind) == 100
    lengths.record(kind, 10)
    lengths.record(kind, 20)
    assert lengths.expected(kind) == 15
    assert lengths.expected(other) == 100
