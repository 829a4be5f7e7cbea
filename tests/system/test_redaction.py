"""Redaction: nothing that somebody else could have chosen is left in a line."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from midfill.config import LogFormat, LogOptions
from midfill.errors import CheckpointError, GenerationError, InvalidRequestError
from midfill.system.logs import configure_logs

SECRET = "nobody should read this"


class Lines:
    """What is logged, as text."""

    def __init__(self, format: LogFormat) -> None:
        configure_logs(LogOptions(format=format, level="debug", redact=True))
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler, logging.StreamHandler)
        self.stream = handler.stream = io.StringIO()

    def __str__(self) -> str:
        return self.stream.getvalue()


@pytest.fixture(params=["text", "json"])
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    root, own = logging.getLogger(), logging.getLogger("midfill")
    before = root.handlers[:], root.level, own.level
    hooks = sys.excepthook, sys.unraisablehook
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("midfill.system.logs.redact_uncaught", lambda: None)
        yield Lines(request.param)
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)
    assert (sys.excepthook, sys.unraisablehook) == hooks


def fail() -> None:
    raise KeyError(SECRET)


def test_an_exception_is_its_kind_and_its_places(lines: Lines) -> None:
    log = logging.getLogger("midfill.serving.server.responses")
    try:
        fail()
    except KeyError as error:
        log.error("a request failed", exc_info=error)
        log.exception("it failed")
        log.warning("because of %s", error)
    assert SECRET not in str(lines)
    assert "a request failed" in str(lines)
    assert "in fail" in str(lines)
    assert str(lines).count("KeyError") == 3


def test_errors_that_quote_requests_are_told_by_their_kind(lines: Lines) -> None:
    log = logging.getLogger("midfill.serving.server.service")
    for quoting in (InvalidRequestError(SECRET), GenerationError(SECRET)):
        log.debug("idle prefill failed: %s", quoting)
    log.warning("the keys stay as they were: %s", CheckpointError("keys.txt: line 3 is wrong"))
    assert SECRET not in str(lines)
    assert "InvalidRequestError" in str(lines)
    assert "keys.txt: line 3 is wrong" in str(lines)


@pytest.mark.parametrize("name", ["asyncio", "uvicorn.error", "midfillish", "py.warnings"])
def test_what_libraries_log_is_withheld(lines: Lines, name: str) -> None:
    logging.getLogger(name).warning(f"{SECRET} %s", SECRET, stack_info=True)
    assert SECRET not in str(lines)
    assert f"a message of {name} (withheld)" in str(lines)


def test_of_a_gateways_lines_the_address_is_left(lines: Lines) -> None:
    log = logging.getLogger("midfill.serving.gateway.pool")
    log.warning("%s %s; it gets no requests", "http://127.0.0.1:8000", SECRET)
    log.warning("servers: %s", "http://a:1, http://b:2")
    log.warning("%s", CheckpointError(SECRET))
    assert SECRET not in str(lines)
    assert "http://127.0.0.1:8000 (withheld); it gets no requests" in str(lines)
    assert "http://a:1, http://b:2" in str(lines)


def test_named_arguments_and_fields_stay(lines: Lines) -> None:
    log = logging.getLogger("midfill.access")
    log.info("%(method)s %(status)s", {"method": "GET", "status": 200}, extra={"tenant": "alice"})
    text = str(lines)
    assert "GET 200" in text
    assert "alice" in text
    if text.startswith("{"):
        assert json.loads(text)["tenant"] == "alice"


def test_what_nothing_catches_has_no_message_either() -> None:
    program = f"""
import threading
from midfill.config import LogOptions
from midfill.system.logs import configure_logs
configure_logs(LogOptions(redact=True))
class Broken:
    def __del__(self): raise KeyError("{SECRET}")
Broken()
def fail(): raise KeyError("{SECRET}")
thread = threading.Thread(target=fail); thread.start(); thread.join()
import resource
assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
fail()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.count("KeyError") == 3
    assert SECRET not in ended.stderr
