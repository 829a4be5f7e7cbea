"""The server where there is neither Linux nor POSIX: nothing on the way of an answer needs them.

Not seen here: what compiled kernels call, and what differs in libraries of other systems' builds.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, start

BARE = Path(__file__).parents[2] / "helpers" / "bare_platform"


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(BARE), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with start(tiny_folder, "--kv-memory", "4MB") as server:
            yield server


def test_it_answers(server: RunningServer) -> None:
    answer = server.complete(prompt="def f(", suffix="return x", max_tokens=4)
    assert answer["usage"]["completion_tokens"] > 0


def test_a_chat_template_is_rendered(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_metrics_and_pages_are_there(server: RunningServer) -> None:
    assert server.metric("engine_restarts_total") <= 1
    assert "midfill playground" in server.get("/").text


def test_an_engine_that_dies_is_restarted(server: RunningServer) -> None:
    os.kill(server.engine_process(), 9)
    server.wait_for(lambda: server.metric("engine_restarts_total") == 1)
    server.wait_for(lambda: server.get("/health").status_code == 200)
    assert server.complete(prompt="def f(", max_tokens=2)["choices"]
