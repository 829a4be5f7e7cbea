"""A server's API under calls that schemathesis makes of its description; ``make fuzz-api``."""

import runpy
from pathlib import Path

import pytest
from fuzzing.api import Calls, call, operations
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
