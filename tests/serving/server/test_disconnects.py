"""Clients that disconnect: wherever their request is, the engine does no more for it."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny

CONTEXT = 16_384
LONG_TEXT = "the quick fox " * 1000  # thousands of steps of a few tokens each
STEP_SECONDS = 0.02


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose prefills take minutes, since its steps are small and slow."""
    folder = tmp_path_factory.mktemp("long") / "tiny-llama"
    write_tiny("llama", folder, max_position_embeddings=CONTEXT)
    options = ["--kv-memory", "64MB", "--token-budget", "4", "--no-idle-prefill"]
    options += ["--log-format", "json"]
    with start(folder, *options, step_seconds=STEP_SECONDS) as server:
        yield server


@contextmanager
def sent(
    server: RunningServer, *, request_id: str = "some", **body: object
) -> Iterator[socket.socket]:
    """Send a completion request over a connection that is closed at the end of the block."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"max_tokens": 5, "temperature": 0, **body}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
            b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (request_id.encode(), len(data), data)
        )
        yield connection


def is_idle(server: RunningServer) -> bool:
    return server.metric("queued_tokens") == 0 and server.is_idle()


def check_works(server: RunningServer) -> None:
    """Every slot gets free, or cached and evictable, and the next request is answered."""

    def no_slot_is_held() -> bool:
        held = server.metric("kv_slots") - server.metric("kv_slots_free")
        return held == server.metric("kv_slots_cached")

    server.wait_for(no_slot_is_held)
    assert server.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("infilling", [False, True])
def test_while_the_prompt_is_computed(server: RunningServer, stream: bool, infilling: bool) -> None:
    before = server.metric("computed_tokens_total")
    prompt = f"{stream} {infilling} {LONG_TEXT}"
    fields = {"suffix": "\n", "midfill": {"window": "as-sent"}} if infilling else {}
    with sent(server, prompt=prompt, stream=stream, **fields):
        server.wait_for(lambda: server.metric("computed_tokens_total") > before + 50)
    server.wait_for(lambda: is_idle(server))
    assert server.metric("computed_tokens_total") - before < 3000
    check_works(server)


def test_while_it_waits_for_the_engine(server: RunningServer) -> None:
    with sent(server, prompt=f"first {LONG_TEXT}"):
        server.wait_for(lambda: server.metric("num_requests_running") == 1)
        admitted = server.metric("prompt_tokens_total")
        # Short prompts would be computed beside the first.
        second, third = f"second {LONG_TEXT}", f"third {LONG_TEXT}"
        with sent(server, prompt=second, stream=True), sent(server, prompt=third):
            server.wait_for(lambda: server.metric("num_requests_waiting") == 2)
        server.wait_for(lambda: server.metric("num_requests_waiting") == 0)
        assert server.metric("num_requests_running") == 1
        assert server.metric("prompt_tokens_total") == admitted
    server.wait_for(lambda: is_idle(server))
    check_works(server)


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_logged_as_nginx_does(server: RunningServer, stream: bool) -> None:
    server.wait_for(lambda: is_idle(server))
    name = f"gone-{stream}"
    with sent(
        server, request_id=name, prompt="a", n=3, max_tokens=4000, ignore_eos=True, stream=stream
    ):
        server.wait_for(lambda: server.metric("num_requests_running") == 3)
    line = server.logged(name)
    assert (line["status"], line["finish_reason"]) == (499, "abort")
    assert line["completion_tokens"] < 3 * 4000


def test_while_its_prompt_is_encoded(server: RunningServer) -> None:
    """One request keeps the encoding thread busy; nothing of it gets any further.

    Small requests may overtake it while its body arrives; they have a few tokens each. The engine
    gets no message before all have gone, so that none is too late to be cancelled.
    """
    engine = server.engine_process()
    admitted = server.metric("prompt_tokens_total")
    os.kill(engine, signal.SIGSTOP)
    try:
        with sent(server, prompt=[f"{number} {LONG_TEXT}" for number in range(100)]):
            for number in range(5):
                with sent(server, prompt=f"behind {number}", stream=bool(number % 2)):
                    pass
        server.wait_for(lambda: server.metric("queued_tokens") == 0)
    finally:
        os.kill(engine, signal.SIGCONT)
    check_works(server)  # its prompt is encoded after all of them
    assert server.metric("prompt_tokens_total") - admitted < 100


def test_while_a_body_is_sent(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt":'
        )
    check_works(server)


def test_a_connection_is_used_again_after_an_answer(server: RunningServer) -> None:
    """What watches for a disconnect takes nothing of the next request."""
    for _ in range(3):
        assert server.complete(prompt="a", max_tokens=1)["choices"]
        with server.client.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}
        ) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"
