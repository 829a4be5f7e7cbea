"""Engines killed under load: the service recovers, and every failed request can be retried."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny

CLIENTS = 6
BODY = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
# Five seconds each, so that a kill meets most of them half-way.
STEP_SECONDS = 0.01
LOAD = {"prompt": "a", "max_tokens": 500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("restarts") / "tiny-llama"
    write_tiny("llama", folder, max_position_embeddings=4096)
    with start(folder, "--kv-memory", "64MB", step_seconds=STEP_SECONDS) as server:
        yield server


@dataclass
class Load:
    """Clients that send one request after the other, and how the requests ended.

    Attributes:
        answered: number of complete answers.
        refused: errors with a status, as (status, Retry-After, error object).
        broken: error events of streams, as error objects.
        others: any other failure; there should be none.
        streaming: the clients whose stream has begun and not ended.
    """

    url: str
    over: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    refused: list[tuple[int, str, dict[str, object]]] = field(default_factory=list)
    broken: list[dict[str, object]] = field(default_factory=list)
    others: list[object] = field(default_factory=list)
    streaming: set[int] = field(default_factory=set)

    def run_client(self, number: int) -> None:
        """Send requests until the load is over, and then until one is answered."""
        with httpx.Client(timeout=120) as client:
            while True:
                over = self.over.is_set()
                if self._ask(client, number) and over:
                    return

    def _ask(self, client: httpx.Client, number: int) -> bool:
        """Send a request and return whether it was answered."""
        streamed = number % 2 == 1
        body = {**LOAD, "stream": streamed}
        try:
            with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                lines = []
                for line in filter(None, response.iter_lines()):
                    lines.append(line)
                    if streamed and response.status_code == 200:
                        self.streaming.add(number)
            self.streaming.discard(number)
            if response.status_code != 200:
                error = msgspec.json.decode("".join(lines))["error"]
                self.refused.append((response.status_code, response.headers["retry-after"], error))
                time.sleep(0.05)  # less than asked for, so that the restarting server is tried
                return False
            if streamed:
                event = msgspec.json.decode(lines[-2].removeprefix("data: "))
                if "error" in event:
                    self.broken.append(event["error"])
                    return False
        except Exception as error:
            self.others.append(error)
            return False
        self.answered += 1
        return True


def restarts_of(server: RunningServer) -> float:
    return server.metric("engine_restarts_total")


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_kills_in_a_row_under_load(server: RunningServer, kills: int) -> None:
    expected = server.complete(**BODY)["choices"][0]["text"]
    load = Load(server.url)
    clients = [
        threading.Thread(target=load.run_client, args=(number,)) for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        for _ in range(kills):
            restarts = restarts_of(server) + 1
            server.wait_for(lambda: server.metric("num_requests_running") == CLIENTS)
            server.wait_for(lambda: bool(load.streaming))
            os.kill(server.engine_process(), signal.SIGKILL)
            server.wait_for(lambda number=restarts: restarts_of(server) == number)
            health = server.get("/health")
            if health.status_code == 503:  # it may be back already
                assert health.json() == {"status": "restarting"}
                assert int(health.headers["retry-after"]) >= 1
            server.wait_for(lambda: server.get("/health").status_code == 200)
            assert server.complete(**BODY)["choices"][0]["text"] == expected
    finally:
        load.over.set()
        for client in clients:
            client.join(120)
    assert not any(client.is_alive() for client in clients)
    assert load.others == []
    assert load.answered >= CLIENTS
    for status, retry_after, _ in load.refused:
        assert status == 503
        assert int(retry_after) >= 1
    assert load.broken
    failures = load.broken + [error for _, _, error in load.refused]
    for error in failures:
        assert error["type"] == "server_error"
        assert error["code"] == "engine_restarting"
        assert "try again" in str(error["message"])
    assert sum("in flight" in str(error["message"]) for error in failures) >= kills
    server.wait_for(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("queued_tokens") == 0


@pytest.mark.slow
def test_an_engine_that_hangs_amid_an_answer_is_ended_and_restarted(tiny_folder: Path) -> None:
    """The whole way for once: a stopped process, the watchdog, SIGKILL, and a new engine."""
    with start(tiny_folder, "--step-timeout", "4", step_seconds=STEP_SECONDS) as server:
        hung = server.engine_process()
        body = {**LOAD, "stream": True}
        with server.client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert "text" in next(lines)
            os.kill(hung, signal.SIGSTOP)
            server.wait_for(lambda: server.get("/health").status_code == 503)
            assert server.get("/livez").status_code == 200
            events = [line for line in lines if line.startswith("data: {")]
        error = msgspec.json.decode(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_restarting"
        server.wait_for(lambda: server.get("/health").status_code == 200)
        assert server.metric("engine_restarts_total") == 1
        assert server.engine_process() != hung
        assert server.complete(**BODY)["choices"][0]["finish_reason"]
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
