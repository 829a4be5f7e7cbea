"""Logs of a server and its engine process: a line per event on standard error, as text or JSON.

What is logged has fields beside its message: those that the caller passes as ``extra``, the named
arguments of the message, and those of ``log_context``. In JSON each is a field of the object; in
text they follow the message as ``name=value``, unless they are in it.

Logs may be redacted: then they hold no word that a client, or a server behind a gateway, could have
chosen. midfill's own lines never quote prompts, answers or keys. Three things could still hold some
of them, and are left out: messages of exceptions, whose cause may be a text; what libraries log;
and what the servers behind a gateway answer. Of an exception, its kind and the places in the code
are left. Who logs a request leaves out the client's own id and unknown paths, see
``serving.server.middleware``.
"""

import json
import logging
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS, merge_record_extra
from pythonjsonlogger.json import JsonFormatter

from midfill.config import LogOptions
from midfill.errors import GenerationError, InvalidRequestError, MidfillError, UpstreamError

log_context: ContextVar[Mapping[str, object] | None] = ContextVar("log_context", default=None)
"""Fields of whatever is logged in a context."""

ACCESS = "midfill.access"
"""The logger of finished requests."""

_OWN = "midfill"  # the logger of everything that midfill logs
_NO_FIELDS = frozenset({*RESERVED_ATTRS, "color_message", "taskName"})  # uvicorn's, Python 3.12's


def configure_logs(options: LogOptions, *, process: str | None = None) -> None:
    """Log on standard error from now on.

    Libraries log warnings and errors only, unless the level is "debug".

    Args:
        options: what to log, and how.
        process: name of the process, if it is not the server's own.
    """
    handler = logging.StreamHandler()
    handler.addFilter(_add_context)
    handler.addFilter(RepeatLimit())
    if options.redact:
        handler.addFilter(redact)
        redact_uncaught()
    handler.setFormatter(_formatter(options, process, handler.stream.isatty()))
    level = logging.getLevelNamesMapping()[options.level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))
    logging.getLogger(_OWN).setLevel(level)
    logging.captureWarnings(True)  # Python's own, which libraries raise, are lines like all others


def _formatter(options: LogOptions, process: str | None, terminal: bool) -> logging.Formatter:
    if options.format == "json":
        return _Json(process)
    return _Terminal(process) if terminal else _Text(process)


def _add_context(record: logging.LogRecord) -> bool:
    for name, value in (log_context.get() or {}).items():
        record.__dict__.setdefault(name, value)
    return True


class RepeatLimit:
    """A filter of ``logging`` that lets only so many warnings and errors of one place in the code.

    What a stranger can cause any number of times would otherwise fill the disk. The last line that
    is let through says so, and the next one how many were left out.

    Args:
        lines: of each place, in each period.
        seconds: a period's length.
        clock: seconds, for tests.
    """

    def __init__(
        self, lines: int = 20, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._periods: dict[tuple[str, str, int], tuple[float, int]] = {}  # beginning, lines

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether a record is let through."""
        if record.levelno < logging.WARNING:
            return True
        place, now = (record.name, record.pathname, record.lineno), self._clock()
        began, count = self._periods.get(place, (-math.inf, 0))
        if now - began >= self._seconds:
            if count > self._lines:
                record.left_out = count - self._lines
            began, count = now, 0
        self._periods[place] = began, count + 1
        if count + 1 == self._lines:
            record.repeats = f"others like it are left out for {self._seconds:g} s"
        return count < self._lines


def _named_arguments(record: logging.LogRecord) -> Mapping[str, object]:
    return record.args if isinstance(record.args, Mapping) else {}


class _Text(logging.Formatter):
    """A line for people."""

    def __init__(self, process: str | None) -> None:
        name = "" if process is None else f"{process} "
        super().__init__(f"%(asctime)s {name}%(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line, without the traceback that may follow it."""
        fields = merge_record_extra(record, {}, _NO_FIELDS)
        shown = _named_arguments(record)
        pairs = [f"{name}={_as_word(value)}" for name, value in fields.items() if name not in shown]
        return " ".join([super().formatMessage(record), *pairs])


class _Terminal(_Text):
    """A line for somebody who watches: of a request, what it has cost in a few words."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line, without the traceback that may follow it."""
        if record.name != ACCESS:
            return super().formatMessage(record)
        time = self.formatTime(record, "%H:%M:%S")
        return "  ".join([f"{time} {record.message}", *_costs(record.__dict__)])


def _costs(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is known of a request's costs, in words."""
    if (error := fields.get("error")) is not None:
        yield str(error)
    if (first := fields.get("ttft_seconds")) is not None:
        yield f"first token {1000 * first:,.0f} ms"
    if (cached := fields.get("cached_tokens")) is not None:
        yield f"prompt {cached} cached + {fields['prompt_tokens'] - cached} computed"
    if (generated := fields.get("completion_tokens")) is not None:
        yield f"{generated} generated"


class _Json(JsonFormatter):
    """A JSON object on one line."""

    def __init__(self, process: str | None) -> None:
        super().__init__(
            ["asctime", "levelname", "name", "message"],
            rename_fields={
                "asctime": "timestamp",
                "levelname": "level",
                "name": "logger",
                "exc_info": "exception",
            },
            static_fields={} if process is None else {"process": process},
            reserved_attrs=sorted(_NO_FIELDS),
        )

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Return the time in UTC, as in RFC 3339."""
        time = datetime.fromtimestamp(record.created, UTC)
        return time.isoformat(timespec="milliseconds")

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        """Add the record's fields to ``log_data``."""
        super().add_fields(log_data, record, {**message_dict, **_named_arguments(record)})


def _as_word(value: object) -> str:
    """Return a value as one word; a text with blanks or anything unprintable is quoted."""
    if not isinstance(value, str):
        return str(value)
    plain = value.isprintable() and not any(character in ' "=' for character in value)
    return value if plain and value else json.dumps(value)


_OWN_LOGGERS = re.compile(r"midfill(\..*)?")
_GATEWAY = re.compile(r"midfill\.serving\.gateway(\..*)?")
_ADDRESSES = re.compile(r"https?://[^\s,]+(, https?://[^\s,]+)*")
_WITHHELD = "(withheld)"
_QUOTING = GenerationError, InvalidRequestError, UpstreamError
"""Errors of midfill's own whose message may quote a request or an answer."""


def redact(record: logging.LogRecord) -> bool:
    """Take everything out of a record that may be a client's; a filter of ``logging``."""
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = places(record.exc_info[1], record.exc_info[2])
        record.exc_info = None
    record.stack_info = None
    if not _OWN_LOGGERS.fullmatch(record.name):
        record.msg, record.args = f"a message of {record.name} {_WITHHELD}", ()
    elif isinstance(record.args, tuple):
        keep = _is_address if _GATEWAY.fullmatch(record.name) else _is_own
        record.args = tuple(_shown(each, keep) for each in record.args)
    return True


def places(error: BaseException | None, trace: TracebackType | None) -> str:
    """Return the kind of an exception and where it was raised, without its message."""
    frames = traceback.extract_tb(trace)
    lines = [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}' for frame in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, type(error).__name__])


def redact_uncaught() -> None:
    """Have exceptions that nothing catches reported without their messages; make no core dumps."""
    sys.excepthook = lambda kind, error, trace: _report(error, trace)
    threading.excepthook = lambda given: _report(given.exc_value, given.exc_traceback)
    sys.unraisablehook = lambda given: _report(given.exc_value, given.exc_traceback)
    with suppress(ImportError):  # Windows has neither
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _report(error: BaseException | None, trace: TracebackType | None) -> None:
    print(places(error, trace), file=sys.stderr, flush=True)


def _shown(argument: object, keep: Callable[[str], bool]) -> object:
    if isinstance(argument, BaseException):
        own = isinstance(argument, MidfillError) and not isinstance(argument, _QUOTING)
        return argument if own and keep is _is_own else type(argument).__name__
    return argument if not isinstance(argument, str) or keep(argument) else _WITHHELD


def _is_own(_: str) -> bool:
    """Keep what midfill itself formats."""
    return True


def _is_address(text: str) -> bool:
    """Keep what says which server is meant."""
    return _ADDRESSES.fullmatch(text) is not None
