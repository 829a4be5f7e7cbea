"""Redaction: logs without a word that a client, or a server behind a gateway, could have chosen.

midfill's own lines never quote prompts, answers or keys. Three things could still hold some of
them, and are left out here: messages of exceptions, whose cause may be a text; what libraries log;
and what the servers behind a gateway answer. Of an exception, its kind and the places in the code
are left. Who logs a request leaves out the client's own id and unknown paths, see
``serving.server.middleware``.
"""

import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

from midfill.errors import GenerationError, InvalidRequestError, MidfillError, UpstreamError

_OWN = re.compile(r"midfill(\..*)?")
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
    if not _OWN.fullmatch(record.name):
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
    if sys.platform != "win32":
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
