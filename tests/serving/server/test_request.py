"""Requests that supersede older ones of their document, and requests whose time is over."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from processes import stopped
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny

STEP_SECONDS = 0.005
# More than a minute's, unless it is superseded.
LONG = {"max_tokens": 15_000, "temperature": 0, "ignore_eos": True}
SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("long") / "tiny-llama"
    write_tiny("llama", folder, max_position_embeddings=16_384)
    keys = ["--api-key", "one", "--api-key", "two"]
    with start(folder, "--kv-memory", "64MB", *keys, step_seconds=STEP_SECONDS) as server:
        server.client.headers["authorization"] = "Bearer one"
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def marked(document: str = "a.py") -> dict[str, object]:
    return {"document": document, "supersede": True}


def ask(server: RunningServer, pool: ThreadPoolExecutor, **body: object) -> Future[dict[str, Any]]:
    """Send a request, and wait until it runs alone; its first choice comes later."""
    server.wait_for(server.is_idle)

    def answer() -> dict[str, Any]:
        return server.complete(**LONG | body)["choices"][0]  # type: ignore[no-any-return]

    future = pool.submit(answer)
    server.wait_for(lambda: server.metric("num_requests_running") == 1)
    return future


def test_an_older_request_ends_with_what_it_has(
    server: RunningServer, pool: ThreadPoolExecutor
) -> None:
    older = ask(server, pool, prompt="a = ", suffix="\n", midfill=marked())
    newer = server.complete(prompt="a = 1", suffix="\n", midfill=marked(), **SHORT)
    choice = older.result(60)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("superseded", None)
    assert newer["choices"][0]["finish_reason"] == "length"
    server.wait_for(server.is_idle)


def test_a_stream_ends_with_a_chunk_that_says_so(
    server: RunningServer, pool: ThreadPoolExecutor
) -> None:
    body = {"prompt": "b = ", "suffix": "\n", "stream": True, "midfill": marked(), **LONG}
    with server.client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        server.complete(prompt="b = 1", suffix="\n", midfill=marked(), **SHORT)
        events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "superseded"


def test_all_of_several_answers_end(server: RunningServer, pool: ThreadPoolExecutor) -> None:
    server.wait_for(server.is_idle)
    older = pool.submit(server.complete, prompt="c = ", suffix="\n", n=3, midfill=marked(), **LONG)
    server.wait_for(lambda: server.metric("num_requests_running") == 3)
    server.complete(prompt="c = 1", suffix="\n", midfill=marked(), **SHORT)
    reasons = [choice["finish_reason"] for choice in older.result(60)["choices"]]
    assert reasons == ["superseded"] * 3


def test_equal_requests_leave_each_other_alone(
    server: RunningServer, pool: ThreadPoolExecutor
) -> None:
    body = {**LONG, "prompt": "d = ", "suffix": "\n", "midfill": marked(), "max_tokens": 200}
    answers = [pool.submit(server.complete, **body) for _ in range(3)]
    choices = [answer.result(60)["choices"][0] for answer in answers]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert len({choice["text"] for choice in choices}) == 1


@pytest.mark.parametrize(
    ("key", "midfill"),
    [
        ("one", {}),
        ("one", {"document": "e.py"}),  # not marked
        ("one", marked("f.py")),
        ("two", marked("e.py")),  # another tenant
    ],
)
def test_any_other_request_does(
    server: RunningServer, pool: ThreadPoolExecutor, key: str, midfill: dict[str, object]
) -> None:
    older = ask(server, pool, prompt="e = ", suffix="\n", midfill=marked("e.py"))
    other = {"prompt": "e = 1", "suffix": "\n", "midfill": midfill, **SHORT}
    headers = {"authorization": f"Bearer {key}"}
    assert server.post("/v1/completions", other, headers=headers).status_code == 200
    time.sleep(0.2)
    assert not older.done()
    server.complete(prompt="e = 2", suffix="\n", midfill=marked("e.py"), **SHORT)
    assert older.result(60)["finish_reason"] == "superseded"


def test_an_unmarked_request_is_not_ended(server: RunningServer, pool: ThreadPoolExecutor) -> None:
    older = ask(
        server, pool, prompt="g = ", suffix="\n", midfill={"document": "g.py"}, max_tokens=400
    )
    server.complete(prompt="g = 1", suffix="\n", midfill=marked("g.py"), **SHORT)
    assert older.result(60)["finish_reason"] == "length"


def test_the_mark_needs_a_name(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "midfill": {"supersede": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "midfill.supersede"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_holds_while_the_engine_says_nothing(
    server: RunningServer, stream: bool
) -> None:
    server.wait_for(server.is_idle)
    body = {"prompt": "h = ", "max_tokens": 1, "stream": stream}
    with stopped(server.engine_process()):
        response = server.post("/v1/completions", body, headers={"X-Request-Timeout": "0.2"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "deadline_exceeded"
    server.wait_for(server.is_idle)
