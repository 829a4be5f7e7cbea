"""A server whose prompts are computed by some engine processes, and answers by others."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions, Workers
from midfill.errors import MidfillError
from midfill.serving.options import ServeOptions

WORKERS = ("--prefill-workers", "1", "--decode-workers", "1")
KEY = "0123456789abcdef"
BODY = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "a", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
ROLES = ("prefill", "decode")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers") / "tiny-llama"
    write_tiny("llama", folder, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[RunningServer]:
    """One engine that does both, to compare with."""
    with start(folder, "--kv-memory", "64MB") as server:
        yield server


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    options = ("--kv-memory", "64MB", "--kv-transfer-key", KEY, "--allow-method", "snapkv")
    with start(folder, *WORKERS, *options) as server:
        yield server


def of_role(server: RunningServer, name: str, role: str) -> float:
    """Return a metric of the worker of a kind."""
    lines = server.get("/metrics").text.splitlines()
    (line,) = (one for one in lines if one.startswith(f'midfill:{name}{{role="{role}"'))
    return float(line.split()[-1])


def test_it_says_how_many_there_are(server: RunningServer) -> None:
    assert "in each of 1 prefill and 1 decode workers" in server.banner
    assert len(server.engine_processes()) == 2
    assert server.get("/readyz").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"n": 2, "temperature": 1.0, "seed": 4},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"suffix": "\n    return x\n"},
        {"prompt": "def area(width, height):\n    return wid", "suffix": "\n"},
        {"max_tokens": 1},
        {"stop": ["e"]},
        {"midfill": {"empty_threshold": 0.5}, "suffix": "\n    return x\n"},
        {"midfill": {"empty_threshold": 0.5}, "prompt": "x = wid", "suffix": "\n"},
    ],
)
def test_answers_are_those_of_one_engine(
    server: RunningServer, alone: RunningServer, fields: dict[str, object]
) -> None:
    body = {**BODY, **fields}
    expected, answer = alone.complete(**body), server.complete(**body)
    assert answer["choices"] == expected["choices"]
    assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_keystrokes_find_the_kv_of_their_document(server: RunningServer) -> None:
    text = "".join(f"line {number} of a document\n" for number in range(60))
    first = server.complete(prompt=text, suffix="\nend\n", max_tokens=4, temperature=0)
    moved = server.metric("kv_transferred_bytes_total")
    next_one = server.complete(prompt=f"{text}x", suffix="\nend\n", max_tokens=4, temperature=0)
    usage = next_one["usage"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 10
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]
    assert server.metric("kv_transferred_bytes_total") > moved


def test_each_worker_does_its_part(server: RunningServer) -> None:
    before = {role: of_role(server, "worker_generated_tokens_total", role) for role in ROLES}
    server.complete(**{**BODY, "max_tokens": 9, "ignore_eos": True})
    assert of_role(server, "worker_generated_tokens_total", "prefill") - before["prefill"] == 1
    assert of_role(server, "worker_generated_tokens_total", "decode") - before["decode"] == 8


def test_prompts_and_tokens_count_once(server: RunningServer) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [server.metric(name) for name in names]
    usage = server.complete(**BODY)["usage"]
    counted = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert counted == [usage["prompt_tokens"], usage["completion_tokens"]]


def test_a_method_of_one_request_works(server: RunningServer) -> None:
    method = {"midfill": {"method": "snapkv:budget=64"}}
    assert server.complete(**BODY, **method)["choices"][0]["finish_reason"]


def test_kv_moves_from_and_to_other_servers(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"content": "some text to move " * 8}).json()["tokens"]
    headers = {"authorization": f"Bearer {KEY}"}
    missing = server.post("/internal/kv/export", {"token_ids": tokens}, headers=headers)
    assert missing.status_code == 404
    server.complete(prompt=tokens, max_tokens=1)
    blob = server.post("/internal/kv/export", {"token_ids": tokens}, headers=headers).content
    imported = server.post("/internal/kv/import", content=blob, headers=headers)
    assert imported.json() == {"tokens": len(tokens)}


@pytest.mark.parametrize("place", [0, 1])
def test_when_a_worker_is_killed_its_answers_go_on_elsewhere(
    folder: Path, alone: RunningServer, place: int
) -> None:
    # An answer takes five seconds, so that the kill meets it half-way.
    with start(folder, *WORKERS, "--kv-memory", "64MB", step_seconds=0.01) as server:
        check_survives(server, alone, place)


def check_survives(server: RunningServer, alone: RunningServer, place: int) -> None:
    """Kill a worker, the first or the second that was started, while it answers."""
    expected = alone.complete(**LONG)["choices"][0]["text"]
    texts: list[str] = []

    def ask() -> None:
        text = ""
        with server.client.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        texts.append(text)

    restarts = server.metric("engine_restarts_total")
    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    server.wait_for(lambda: of_role(server, "worker_requests_running", "decode") == 3)
    os.kill(server.engine_processes()[place], signal.SIGKILL)
    for client in clients:
        client.join(120)
    assert texts == [expected] * 3
    assert server.get("/readyz").status_code == 200
    server.wait_for(lambda: server.metric("engine_restarts_total") == restarts + 1, 120)
    server.wait_for(lambda: of_role(server, "worker_up", ROLES[place]) == 1, 120)
    assert server.complete(**BODY)["choices"] == alone.complete(**BODY)["choices"]
    server.wait_for(lambda: server.metric("num_requests_running") == 0)


@pytest.mark.parametrize(
    ("workers", "method", "words"),
    [
        (Workers(1, 0), "none", "--prefill-workers needs --decode-workers, too"),
        (Workers(0, 2), "none", "--decode-workers needs --prefill-workers, too"),
        (Workers(1, 1), "snapkv:budget=64", "--method snapkv:budget=64 and"),
    ],
)
def test_workers_that_cannot_serve_are_refused(workers: Workers, method: str, words: str) -> None:
    with pytest.raises(MidfillError, match=words):
        ServeOptions(model="m", workers=workers, options=ModelOptions(method=method))


def test_workers_take_no_kv_from_elsewhere_unasked() -> None:
    reuse = "cacheblend:ratio=0.4"
    with pytest.raises(MidfillError, match=f"--reuse {reuse} and --decode-workers don't go"):
        ServeOptions(model="m", workers=Workers(1, 1), options=ModelOptions(reuse=reuse))
    ServeOptions(model="m", workers=Workers(1, 1), options=ModelOptions(reuse="off"))


def test_workers_try_no_other_candidates() -> None:
    with pytest.raises(MidfillError, match="--candidates and --decode-workers don't go together"):
        ServeOptions(model="m", workers=Workers(1, 1), candidates=2)
