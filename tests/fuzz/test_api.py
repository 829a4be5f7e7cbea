"""A server under calls, and a gateway under answers, of all kinds: ``make fuzz-api``."""

import asyncio
import runpy
from pathlib import Path

import pytest
from fuzzing.api import Calls, call, operations
from fuzzing.connections import ByteCalls, Stalls, endpoints
from fuzzing.upstreams import attack
from running_server import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

EXAMPLES = 24  # per operation


def test_no_call_is_a_server_error_or_hangs(tmp_path: Path) -> None:
    write_model = runpy.run_path(str(Path(__file__).parent / "api.py"))["write_model"]
    calls = Calls()
    with start(write_model(tmp_path / "tiny-llama"), "--allow-method", "any") as server:
        for operation in operations(server.url):
            call(operation, calls, EXAMPLES)
        assert server.metric("engine_restarts_total") == 0
    assert not calls.bugs, "\n".join(calls.bugs)
    assert calls.statuses[200] > 50
    assert calls.statuses[400] > 50


def test_no_bytes_are_a_server_error_or_hang(tmp_path: Path) -> None:
    made = runpy.run_path(str(Path(__file__).parent / "api.py"))
    calls, options = Calls(), ("--client-timeout", "1", "--warm-tier-disk", "8MB")
    folder = made["poison"](tmp_path / "kv")
    with (
        start(
            made["write_model"](tmp_path / "tiny-llama"),
            *options,
            "--warm-tier-folder",
            str(folder),
        ) as server,
        Stalls(server.url, server.process.pid) as stalls,
    ):
        described = endpoints(server.get("/openapi.json").json())
        ByteCalls(server.url, described, calls, stalls).send_all(range(600))
        assert server.metric("engine_restarts_total") == 0
    assert not calls.bugs, "\n".join(calls.bugs)
    assert calls.statuses[200] > 50
    assert calls.statuses[400] > 50


def test_no_answer_of_a_server_behind_it_hurts_a_gateway() -> None:
    run = asyncio.run(attack(range(200), 1))
    assert not run.bugs, "\n".join(run.bugs)
    assert run.statuses[200] > 10
    assert run.statuses[503] > 10
