"""The server where there is neither Linux nor POSIX: nothing on the way of an answer needs them.

Not seen here: what compiled kernels call, and what differs in libraries of other systems' builds.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, start

BARE = Path(__file__).parents[2] / "helpers" / "bare_platform"


@pytest.fixture(scope="module")
def bare() -> Iterator[None]:
    """Interpreters that are started have nothing of Linux or POSIX."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(BARE), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


@pytest.fixture(scope="module")
def server(bare: None, tiny_folder: Path) -> Iterator[RunningServer]:
    with start(tiny_folder, "--kv-memory", "4MB") as server:
        yield server


def run(code: str) -> None:
    """Run a program there."""
    # filelock warns that there is no fcntl.
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # a cache that can't be used costs a line


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


def test_packed_weights_are_kept_and_read_again(bare: None, tmp_path: Path) -> None:
    run(f"""
from pathlib import Path
import numpy as np
from midfill.runners.cpu.packed_arrays import read_arrays, write_arrays
from midfill.system.cache import store_file
from midfill.system.files import read_ahead, release_pages
from midfill.system.progress import ignore_progress

path, arrays = Path({str(tmp_path)!r}, "packed"), {{"norm": np.arange(9, dtype=np.float32)}}
store_file(path, lambda file: write_arrays(file, arrays))
read = read_arrays(path, ignore_progress)
assert read is not None and np.array_equal(read["norm"], arrays["norm"])
mapped = np.memmap(path, np.uint8, "r")
read_ahead(mapped)
release_pages(mapped)
""")


def test_an_engine_that_hangs_can_be_ended(bare: None) -> None:
    run("""
import asyncio
from midfill.engine.process.supervision import EngineProcess

async def end() -> None:
    process = EngineProcess.spawn()
    await process.abort()
    await process.close()
    assert process.exit_status

asyncio.run(end())
""")
