"""Logs: a line per event, as text or JSON, with the fields of its context."""

import contextvars
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from midfill.config import LogFormat, LogLevel, LogOptions
from midfill.system.logs import configure_logs, log_context

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
