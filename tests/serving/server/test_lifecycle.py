"""The server's start and end, and clients that disconnect: nothing is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from processes import default_interrupt, ignored_interrupt, is_running, wait_for
from running_server import RunningServer, start
from tiny_adapters import FIM, write_adapter, write_record
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions
from midfill.serving.options import ServeOptions
from midfill.serving.server.startup import run_server

CONTEXT = 16_384
STEP_SECONDS = 0.02  # a request for the whole context takes minutes unless it is cancelled
LONG = {"prompt": "a", "max_tokens": 16_000, "n": 2, "temperature": 0, "ignore_eos": True}
FOREVER = {"n_predict": -1, "temperature": 0, "ignore_eos": True}
LONG_REQUESTS = {
    "/v1/completions": LONG,
    "/infill": {**FOREVER, "input_prefix": "a", "input_suffix": "b", "input_extra": []},
    "/completion": {**FOREVER, "prompt": "a"},
}


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "tiny-llama"
    return write_tiny("llama", folder, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(long_folder: Path) -> Iterator[RunningServer]:
    with start(long_folder, "--kv-memory", "64MB", step_seconds=STEP_SECONDS) as server:
        yield server


@pytest.fixture
def own_server(long_folder: Path) -> Iterator[RunningServer]:
    """A server for a test that breaks it."""
    with start(long_folder, "--kv-memory", "64MB") as server:
        yield server


def check_nothing_held(server: RunningServer) -> None:
    """Check that every slot is free, or in the prefix cache and evictable."""
    held = server.metric("kv_slots") - server.metric("kv_slots_free")
    assert held == server.metric("kv_slots_cached")
    assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("path", LONG_REQUESTS)
def test_a_stream_whose_client_disconnects_is_cancelled(server: RunningServer, path: str) -> None:
    before = server.metric("generation_tokens_total")
    body = {**LONG_REQUESTS[path], "stream": True}
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert not server.is_idle()
    server.wait_for(server.is_idle)
    assert server.metric("generation_tokens_total") - before < 16_000
    check_nothing_held(server)


@pytest.mark.parametrize("path", LONG_REQUESTS)
def test_an_answer_whose_client_disconnects_is_cancelled(server: RunningServer, path: str) -> None:
    before = server.metric("generation_tokens_total")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG_REQUESTS[path]).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        )
        server.wait_for(lambda: not server.is_idle())
    server.wait_for(server.is_idle)
    assert server.metric("generation_tokens_total") - before < 16_000
    check_nothing_held(server)


def test_an_idle_engine_takes_no_processor_time(server: RunningServer) -> None:
    server.complete(prompt="a", max_tokens=1)
    server.wait_for(server.is_idle)
    engine = server.engine_process()
    before = processor_seconds(engine)
    time.sleep(1)
    assert processor_seconds(engine) - before <= 0.05


def test_the_banner_says_what_is_served(server: RunningServer) -> None:
    assert "tiny-llama" in server.banner
    assert "3 layers" in server.banner
    assert "adapter" not in server.banner
    assert f"{server.metric('kv_slots'):.0f} tokens" in server.banner
    assert f"curl {server.url}/v1/completions" in server.banner
    assert "Authorization" not in server.banner


def test_an_adapter_is_served_and_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = write_adapter(tiny_folder, tmp_path / "tiny-fim")
    write_record(folder, tiny_folder)
    with start(tiny_folder, "--kv-memory", "4MB", "--adapter", str(folder)) as server:
        assert re.search(r"^  adapter  tiny-fim$", server.banner, re.MULTILINE)
        assert f"FIM tokens {FIM['prefix']} {FIM['suffix']} {FIM['middle']}" in server.banner
        answer = server.complete(prompt="a", suffix="b", max_tokens=2)
        assert answer["midfill"]["sentinels"] is True


SERVER_SIDE = """
import sys
from pathlib import Path
from midfill.serving.server.opened_model import open_model
checkpoint = open_model(Path(sys.argv[1]), Path(sys.argv[2]))
checkpoint.tokenizer.prepare()
heavy = {"gguf", "llvmlite", "numba", "torch", "transformers"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_what_computes_is_loaded_in_the_engine_s_process_alone(
    tiny_folder: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tiny_folder, tmp_path / "tiny-fim")
    command = [sys.executable, "-c", SERVER_SIDE, str(tiny_folder), str(adapter)]
    subprocess.run(command, check=True, timeout=60)


def test_one_that_is_ended_while_it_loads_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midfill", "serve", str(tiny_folder), "--port", "0"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment) as process:
        wait_for(lambda: any(tmp_path.glob("*/engine")))
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


ENDED_EARLY = """
import os, signal, sys

class EndsIt:
    def find_spec(self, name, path=None, target=None):
        if name == f"midfill.cli.{sys.argv[1]}" or name == "midfill.cli.app":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, EndsIt())
from midfill.cli import main
main()
"""


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_one_that_is_ended_before_its_command_is_loaded_says_so(command: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDED_EARLY, command], capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, b"", b"")


def test_clients_can_connect_when_the_server_says_it_is_ready(tiny_folder: Path) -> None:
    class EnoughError(Exception):
        pass

    def ready(url: str, *_: object) -> None:
        host, port = url.removeprefix("http://").split(":")
        socket.create_connection((host, int(port)), timeout=60).close()
        raise EnoughError

    options = ServeOptions(
        model=str(tiny_folder), port=0, options=ModelOptions(kv_memory=4_000_000, threads=1)
    )
    with pytest.raises(EnoughError):
        run_server(options, tiny_folder, on_ready=ready)


def test_a_server_ends_that_is_told_to_as_it_says_it_is_ready(tiny_folder: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from midfill.config import ModelOptions
from midfill.serving.options import ServeOptions
from midfill.serving.server.startup import run_server

options = ServeOptions(
    model={str(tiny_folder)!r}, port=0, options=ModelOptions(kv_memory=4_000_000, threads=1)
)
run_server(options, Path(options.model), on_ready=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=240)
    assert ended.returncode in (0, 128 + signal.SIGTERM)


def test_the_engine_ends_with_its_server(own_server: RunningServer) -> None:
    engine = own_server.engine_process()
    own_server.process.kill()
    own_server.process.wait()
    wait_for(lambda: not is_running(engine))


@pytest.mark.parametrize(
    ("parent", "number"),
    [
        (default_interrupt, signal.SIGINT),
        (default_interrupt, signal.SIGTERM),
        (ignored_interrupt, signal.SIGTERM),
    ],
)
def test_a_signal_ends_the_server_and_its_engine(
    tiny_folder: Path, parent: Callable[[], None], number: signal.Signals
) -> None:
    with start(tiny_folder, "--kv-memory", "4MB", signals=parent) as server:
        engine = server.engine_process()
        server.process.send_signal(number)
        assert server.process.wait(60) in (0, 128 + number)
    wait_for(lambda: not is_running(engine))


def processor_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stream(server: RunningServer, **body: object) -> AbstractContextManager[httpx.Response]:
    """Ask for a streamed answer."""
    body = {**LONG, "stream": True, **body}
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)


def events_of(lines: Iterable[str]) -> list[str]:
    """Return the data of all events that a stream's lines hold."""
    return [line.removeprefix("data: ") for line in lines if line]


def refuses_connections(server: RunningServer) -> bool:
    host, port = server.url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_an_answer_in_progress_may_end_before_the_server_does(long_folder: Path) -> None:
    options = ["--kv-memory", "64MB", "--drain-timeout", "60"]
    with start(long_folder, *options, step_seconds=STEP_SECONDS) as server:
        with stream(server, n=1, max_tokens=150) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for(lambda: refuses_connections(server))
            *_, last, done = events_of([first, *lines])
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert server.process.wait(60) in (0, 128 + signal.SIGTERM)


def test_it_may_end_too_if_a_supervisor_signals_all_processes(long_folder: Path) -> None:
    options = ["--kv-memory", "64MB", "--drain-timeout", "60"]
    with start(long_folder, *options, step_seconds=STEP_SECONDS) as server:
        with stream(server, n=1, max_tokens=50) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            for process in (server.engine_process(), server.process.pid):
                os.kill(process, signal.SIGTERM)
            *_, last, done = events_of([first, *lines])
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert server.process.wait(60) in (0, 128 + signal.SIGTERM)


def test_an_answer_that_takes_too_long_is_told_to_try_again(long_folder: Path) -> None:
    options = ["--kv-memory", "64MB", "--drain-timeout", "1"]
    with start(long_folder, *options, step_seconds=STEP_SECONDS) as server:
        with stream(server) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            *_, last, done = events_of([first, *lines])
        error = json.loads(last)["error"]
        assert (error["code"], error["type"]) == ("server_stopping", "server_error")
        assert "try again" in error["message"]
        assert done == "[DONE]"
        assert server.process.wait(60) in (0, 128 + signal.SIGTERM)
