"""More than can be done in time: 429 or 503 with Retry-After, from every endpoint."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from running_server import RunningServer, start

TEXT = "a b c " * 20


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    with start(tiny_folder, "--kv-memory", "4MB", "--max-queued-tokens", "60") as server:
        yield server


@pytest.fixture
def full_queue(server: RunningServer) -> Iterator[RunningServer]:
    """A server whose engine is stopped while a request is queued, which is answered later."""
    engine = server.engine_process()
    answers: list[dict[str, object]] = []
    waiting = threading.Thread(
        target=lambda: answers.append(server.complete(prompt=TEXT, max_tokens=2))
    )
    os.kill(engine, signal.SIGSTOP)
    try:
        waiting.start()
        server.wait_for(lambda: server.metric("queued_tokens") > 0)
        yield server
    finally:
        os.kill(engine, signal.SIGCONT)
        waiting.join(60)
    assert len(answers) == 1
    assert server.metric("queued_tokens") == 0
    server.complete(prompt=TEXT, max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_beyond_the_queue_are_refused(
    full_queue: RunningServer, path: str, stream: bool
) -> None:
    messages = [{"role": "user", "content": TEXT}]
    body = {"prompt": TEXT, "messages": messages, "max_tokens": 1, "stream": stream}
    response = full_queue.post(path, body)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert "at most 60" in error["message"]


def test_openais_client_recognises_the_error(full_queue: RunningServer) -> None:
    with pytest.raises(openai.RateLimitError):
        full_queue.openai().completions.create(model="tiny-llama", prompt=TEXT)


@pytest.mark.parametrize("header", ["X-Request-Timeout", "X-Stainless-Read-Timeout"])
def test_nothing_is_computed_for_a_client_that_no_longer_waits(
    server: RunningServer, header: str
) -> None:
    engine = server.engine_process()
    before = server.metric("computed_tokens_total")
    answers = []

    def ask() -> None:
        body = {"prompt": f"{header} {TEXT}", "max_tokens": 1}
        answers.append(server.post("/v1/completions", body, headers={header: "0.3"}))

    waiting = threading.Thread(target=ask)
    os.kill(engine, signal.SIGSTOP)
    try:
        waiting.start()
        # On a slow machine it may be over before it is queued.
        server.wait_for(lambda: server.metric("queued_tokens") > 0 or bool(answers))
        time.sleep(0.4)  # what the client has
    finally:
        os.kill(engine, signal.SIGCONT)
        waiting.join(60)
    (response,) = answers
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert server.metric("computed_tokens_total") == before
    assert server.metric("queued_tokens") == 0


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_that_is_no_time_is_refused(server: RunningServer, value: str) -> None:
    headers = {"X-Request-Timeout": value}
    response = server.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("value", ["None", "600", ""])
def test_what_libraries_say_of_their_timeouts_is_never_an_error(
    server: RunningServer, value: str
) -> None:
    headers = {"X-Stainless-Read-Timeout": value}
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    assert response.status_code == 200
