"""Logs: a line per event with its context; redacted, nothing that others have chosen."""

import contextvars
import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from midfill.config import LogFormat, LogLevel, LogOptions
from midfill.errors import CheckpointError, GenerationError, InvalidRequestError
from midfill.system.logs import RepeatLimit, configure_logs, log_context

_log = logging.getLogger("midfill.some.module")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("midfill")
    before = root.handlers[:], root.level, own.level
    logging.captureWarnings(False)  # where it is in force already, configure_logs() changes nothing
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])
    logging.captureWarnings(False)


def configure(
    format: LogFormat = "text", level: LogLevel = "info", process: str | None = None
) -> None:
    configure_logs(LogOptions(format=format, level=level), process=process)


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_text_shows_fields_behind_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    _log.info("%(method)s %(path)s", {"method": "GET", "path": "/"}, extra={"status": 200, "a": ""})
    _log.warning("%d of %d", 1, 2, extra={"name_of_it": 'two "words"\n'})
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith('INFO GET / status=200 a=""')
    assert second.endswith(r'WARNING 1 of 2 name_of_it="two \"words\"\n"')


def test_a_terminal_shows_what_a_request_has_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure()
    access = logging.getLogger("midfill.access")
    costs = {"prompt_tokens": 310, "cached_tokens": 298, "completion_tokens": 9}
    access.info("POST /infill 200", extra={"request_id": "a", "ttft_seconds": 0.0421, **costs})
    access.info("POST /infill 429", extra={"request_id": "a", "error": "queue_full"})
    _log.info("it", extra={"a": 1})
    served, refused, other = capsys.readouterr().err.splitlines()
    assert served[8:] == (
        " POST /infill 200  first token 42 ms  prompt 298 cached + 12 computed  9 generated"
    )
    assert refused[8:] == " POST /infill 429  queue_full"
    assert other.endswith("INFO it a=1")


def test_json_has_an_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    _log.info("%(method)s it", {"method": "GET"}, extra={"status": 200})
    try:
        raise ValueError("two\nlines, and a \udcff")
    except ValueError:
        _log.exception("failed")
    first, second = objects(capsys)
    time = first.pop("timestamp")
    assert time.endswith("+00:00")
    assert first == {
        "level": "INFO",
        "logger": "midfill.some.module",
        "message": "GET it",
        "method": "GET",
        "status": 200,
    }
    assert second["level"] == "ERROR"
    assert second["exception"].startswith("Traceback")


def test_pythons_warnings_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure("json")
        warnings.warn("an old name", stacklevel=1)
    (line,) = objects(capsys)
    assert line["level"] == "WARNING"
    assert "an old name" in line["message"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_contexts_fields_are_on_each_of_its_lines(
    capsys: pytest.CaptureFixture[str], format: LogFormat
) -> None:
    def in_a_request() -> None:
        log_context.set({"request_id": "its id"})
        logging.getLogger("a.library").warning("inside")

    configure(format, process="engine")
    contextvars.copy_context().run(in_a_request)
    _log.info("outside")
    inside, outside = capsys.readouterr().err.splitlines()
    if format == "json":
        assert json.loads(inside)["request_id"] == "its id"
        assert json.loads(inside)["process"] == "engine"
    else:
        assert 'engine WARNING inside request_id="its id"' in inside
    assert "request_id" not in outside


@pytest.mark.parametrize(
    ("level", "own", "libraries"),
    [
        ("debug", ["debug", "info", "warning", "error"], ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"], ["warning", "error"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_levels(
    capsys: pytest.CaptureFixture[str], level: LogLevel, own: list[str], libraries: list[str]
) -> None:
    configure("json", level)
    for name in ("midfill.a", "library"):
        for each in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), each)(each)
    logged = [(line["logger"], line["message"]) for line in objects(capsys)]
    assert logged == [*(("midfill.a", each) for each in own), *(("library", x) for x in libraries)]


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


def test_one_place_in_the_code_logs_only_so_many_warnings() -> None:
    now = 0.0
    limit = RepeatLimit(lines=3, seconds=10, clock=lambda: now)

    def warn(level: int = logging.WARNING, line: int = 1) -> logging.LogRecord | None:
        record = logging.LogRecord("uvicorn.error", level, "file.py", line, "invalid", (), None)
        return record if limit(record) else None

    let = [warn() for _ in range(10)]
    assert [record is not None for record in let] == [True] * 3 + [False] * 7
    assert let[2] is not None
    assert "left out for 10 s" in let[2].__dict__["repeats"]
    assert warn(line=2) is not None
    assert all(warn(logging.INFO) for _ in range(10))
    now = 10.0
    after = warn()
    assert after is not None
    assert after.__dict__["left_out"] == 7
    assert "left_out" not in warn().__dict__
