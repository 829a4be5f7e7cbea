"""``midfill batch`` with a tiny model: answers equal the server's, one by one, and runs resume."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import default_interrupt, wait_for
from running_server import RunningServer
from slowed_engines import slowed

from midfill.config import ModelOptions
from midfill.errors import OptionError
from midfill.serving.options import ServeOptions
from midfill.serving.server.batch.api import InProcessApi
from midfill.serving.server.batch.job import BatchJob, BatchProgress, PlannedPrompt
from midfill.serving.server.batch.opening import open_row_service
from midfill.serving.server.batch.prefix_groups import find_prefix_groups
from midfill.serving.server.batch.results import ResultFile
from midfill.serving.server.batch.row_budget import RowBudget
from midfill.serving.server.batch.rows import RowFile
from midfill.serving.server.offline_batch import run_batch
from midfill.serving.server.opened_model import open_engine

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
VOLATILE = ("id", "created", "request_id")


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests of all kinds, with nested shared prefixes."""
    rng = random.Random(seed)
    heads = [""]
    for _ in range(6):
        heads.append(rng.choice(heads) + text(rng, 20) + "\n")
    rows = []
    for number in range(count):
        prompt = rng.choice(heads) + text(rng, rng.randint(1, 12))
        body: dict[str, Any] = {"max_tokens": rng.choice((2, 6)), "temperature": 0}
        url = "/v1/completions"
        if number % 3 == 0:
            body |= {"prompt": prompt, "suffix": "\n" + text(rng, 5)}
        elif number % 3 == 1:
            body |= {"prompt": prompt, "logprobs": 1}
        else:
            url = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": prompt}]}
        rows.append({"custom_id": f"row {number}", "method": "POST", "url": url, "body": body})
    return rows


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def results_of(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row["response"] for row in rows}


def without_volatile(value: Any) -> Any:
    """A response without ids, times, and what depends on what was cached."""
    if isinstance(value, dict):
        left_out = {*VOLATILE, "cached_tokens", "computed_tokens", "document"}
        return {key: without_volatile(inner) for key, inner in value.items() if key not in left_out}
    return [without_volatile(inner) for inner in value] if isinstance(value, list) else value


def options(folder: Path, kv_memory: int = 4 << 20) -> ServeOptions:
    run = ModelOptions(threads=1, kv_memory=kv_memory)
    return ServeOptions(model=str(folder), options=run)


def test_answers_are_those_of_a_server_one_by_one(
    tiny_folder: Path, server: RunningServer, tmp_path: Path
) -> None:
    rows = rows_of(60)
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    seen: list[BatchProgress] = []
    done = run_batch(options(tiny_folder), tiny_folder, source, output, report=seen.append)
    assert (done.rows, done.done, done.failed) == (60, 60, 0)
    assert seen
    results = results_of(output)
    for row in rows:
        served = server.post(row["url"], row["body"])
        response = results[row["custom_id"]]
        assert response["status_code"] == served.status_code == 200
        expected = without_volatile(served.json())
        found = without_volatile(response["body"])
        if "suffix" in row["body"]:  # the server remembers documents, and may cut elsewhere
            expected["choices"], expected["midfill"] = found["choices"], found["midfill"]
        assert found == expected


def test_an_answer_depends_on_its_row_alone(tiny_folder: Path, tmp_path: Path) -> None:
    rows = rows_of(45, seed=1)
    first = tmp_path / "first.jsonl"
    run_batch(options(tiny_folder), tiny_folder, write(tmp_path / "a.jsonl", rows), first)
    random.Random(2).shuffle(rows)
    second = tmp_path / "second.jsonl"
    source = write(tmp_path / "b.jsonl", rows)
    # A pool that is smaller than the batch, and runs begun twice.
    run_batch(options(tiny_folder, 1 << 20), tiny_folder, source, second)
    second.write_bytes(b"".join(second.read_bytes().splitlines(keepends=True)[:10]))
    run_batch(options(tiny_folder, 1 << 20), tiny_folder, source, second)
    assert without_volatile(results_of(first)) == without_volatile(results_of(second))


def test_what_is_computed_is_at_most_what_the_plan_says(tiny_folder: Path, tmp_path: Path) -> None:
    """Groups save as much as they promise; the prefix cache may find more levels than one."""
    rows = rows_of(60, seed=3)

    async def run() -> tuple[BatchProgress, int]:
        served = options(tiny_folder)
        async with open_engine(served, tiny_folder) as opened:
            service = await open_row_service(served, opened)
            api = InProcessApi(service)
            prompts = []
            for row in rows:
                planned = await api.plan(row["url"], json.dumps(row["body"]).encode())
                assert isinstance(planned, PlannedPrompt)
                prompts.append(planned.tokens)
            source = RowFile(write(tmp_path / "in.jsonl", rows), 1 << 20)
            results = ResultFile(tmp_path / "out.jsonl")
            done = await BatchJob(source, results, api, RowBudget(opened.info.slots)).run()
            source.close()
            results.close()
            service.close()
        assert sum(map(len, prompts)) == done.prompt_tokens
        # The engine waits for a shared prefix of 32 tokens or more, and else computes it again.
        groups = [group for group in find_prefix_groups(prompts) if group.prefix >= 32]
        return done, sum(group.saving for group in groups)

    done, saving = asyncio.run(run())
    assert saving > 0
    assert done.cached_tokens >= saving


def test_more_is_shared_than_by_a_cache_in_the_order_of_the_file(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Of prefixes that don't fit together, an LRU cache has evicted the one that comes next."""
    rng = random.Random(6)
    heads = [text(rng, 60) for _ in range(4)]
    rows = []
    for number in range(32):
        body = {"prompt": f"{heads[number % 4]} {number}", "max_tokens": 2, "temperature": 0}
        row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        rows.append(row)

    async def one_by_one() -> int:
        served, cached = options(tiny_folder, 1 << 20), 0
        async with open_engine(served, tiny_folder) as opened:
            service = await open_row_service(served, opened)
            api = InProcessApi(service)
            for row in rows:
                answered = await api.answer(row["url"], json.dumps(row["body"]).encode())
                usage = json.loads(answered.body)["usage"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
            service.close()
        return cached

    source = write(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    planned = run_batch(options(tiny_folder, 1 << 20), tiny_folder, source, output)
    assert planned.failed == 0
    assert planned.cached_tokens > 0.8 * planned.prompt_tokens
    assert asyncio.run(one_by_one()) < 0.5 * planned.cached_tokens


def test_a_killed_run_is_gone_on_with(tiny_folder: Path, tmp_path: Path) -> None:
    rows = rows_of(40, seed=4)
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "midfill", "batch", str(source), "-o", str(output)]
    command += ["-m", str(tiny_folder), "--threads", "1", "--kv-memory", "256KB"]
    environment = slowed({**os.environ, "OMP_NUM_THREADS": "1"}, 0.02)

    def lines() -> int:
        return len(output.read_bytes().splitlines()) if output.exists() else 0

    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as first:
        wait_for(lambda: lines() >= 5 or first.poll() is not None)
        first.send_signal(signal.SIGKILL)
    there = lines()
    assert 5 <= there < 40
    kept = output.read_bytes().splitlines()[: there - 1]
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_9')
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "40 of 40 rows have a result" in second.stderr
    assert output.read_bytes().splitlines()[: len(kept)] == kept
    assert len(results_of(output)) == 40


def test_ctrl_c_leaves_whole_rows(tiny_folder: Path, tmp_path: Path) -> None:
    rows = rows_of(40, seed=5)
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "midfill", "batch", str(source), "-o", str(output)]
    command += ["-m", str(tiny_folder), "--threads", "1", "--kv-memory", "256KB"]
    environment = slowed({**os.environ, "OMP_NUM_THREADS": "1"}, 0.02)
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupt
    ) as run:
        wait_for(lambda: output.exists() and output.stat().st_size > 0)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert said.endswith("the same command goes on with what is missing\n"), said
    assert results_of(output)
    assert sorted(tmp_path.iterdir()) == [source, output]


def test_the_output_may_not_be_the_input(tiny_folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", rows_of(1))
    with pytest.raises(OptionError, match="the output is the input"):
        run_batch(options(tiny_folder), tiny_folder, source, source)
    assert source.read_text()
