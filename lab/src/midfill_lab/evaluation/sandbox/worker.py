"""The sandbox's worker: runs untrusted programs, one after the other, in forks of itself.

It runs in a bare interpreter, so it imports the standard library only. Programs inherit the
modules loaded here; running one takes three forks and no interpreter start:

    worker       waits for jobs; reads nothing of them, so that the forks of later jobs can't either
      supervisor   reads the program, enforces the wall time limit, replies
        judge        reads reference and tests, decides
        program      executes the program, answers the judge's calls

The judge's tests and reference solution are trusted; everything that the program's process sends
is in the program's hands. Its guarantees are described in the package's docstring.
"""

# Programs use these modules; a fork inherits them at no cost.

import bisect  # noqa: F401
import collections  # noqa: F401
import contextlib
import copy  # noqa: F401
import datetime  # noqa: F401
import functools  # noqa: F401
import hashlib  # noqa: F401
import heapq  # noqa: F401
import itertools  # noqa: F401
import json  # noqa: F401
import math  # noqa: F401
import operator  # noqa: F401
import os
import random
import re
import select
import shutil
import signal
import string  # noqa: F401
import tempfile
import time
import typing
from collections.abc import Callable
from typing import Any

from midfill_lab.evaluation.sandbox import isolation
from midfill_lab.evaluation.sandbox.values import (
    FrameError,
    decode,
    encode,
    exception_name,
    make_exception,
    read_frame,
    write_frame,
)

JOBS, REPLIES = 0, 1
"""Descriptors of the protocol below."""

_ENDING_SECONDS = 0.2  # for a process that closed its pipes to end, so that it can be said how


class Job(typing.TypedDict):
    """A program, as the supervisor reads it from ``JOBS``.

    The judge reads ``{"reference", "test"}`` from a third descriptor. The reply on ``REPLIES`` is
    ``{"passed", "reason"}`` or ``{"error"}``; the worker's first one is ``{"isolation"}`` or
    ``{"error"}``.
    """

    source: str
    entry_point: str
    cpu_seconds: int
    wall_seconds: float
    memory_bytes: int
    file_bytes: int


def main(mode: str, folder: str, tests: str) -> None:
    """Serve jobs until there are no more.

    Args:
        mode: "namespaces" or "audit-hook".
        folder: an empty folder for the programs' working directories.
        tests: number of the descriptor that judges read tests from.
    """
    in_namespaces = mode == "namespaces"
    if in_namespaces:
        try:
            isolation.enter_namespaces(folder)
        except (OSError, AttributeError) as error:  # AttributeError: a libc without unshare
            write_frame(REPLIES, {"error": f"no namespaces: {error}"})
            return
    isolation.hide_memory()
    write_frame(REPLIES, {"isolation": mode})
    while True:
        select.select([JOBS], [], [])
        supervisor = os.fork()
        if supervisor == 0:
            place = isolation.PLACE if in_namespaces else folder
            _serve_one_job(in_namespaces, place, int(tests))
        _, status = os.waitpid(supervisor, 0)
        if status:  # there are no more jobs, or it was killed and left a job half read
            return


def _serve_one_job(in_namespaces: bool, folder: str, tests: int) -> typing.NoReturn:
    status = 1
    try:
        job = typing.cast(Job, read_frame(JOBS))
        write_frame(REPLIES, _supervise(job, in_namespaces, folder, tests))
        status = 0
    except FrameError:
        pass
    except BaseException as error:
        write_frame(REPLIES, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(status)


def _supervise(job: Job, in_namespaces: bool, folder: str, tests: int) -> dict[str, object]:
    """Run one program and its judge as children of this process; return the reply."""
    place = folder if in_namespaces else tempfile.mkdtemp(dir=folder)
    calls, calls_end = os.pipe()
    replies, replies_end = os.pipe()
    verdict, verdict_end = os.pipe()
    deadline = time.monotonic() + job["wall_seconds"]
    judging = os.fork()
    if judging == 0:
        _become_judge(job, in_namespaces, (tests, calls_end, replies, verdict_end))
    if in_namespaces:
        isolation.enter_process_namespace()
        isolation.mount_memory(place)
    program = os.fork()
    if program == 0:
        _become_program(job, in_namespaces, place, (calls, replies_end))
    for end in (calls, calls_end, replies, replies_end, verdict_end):
        os.close(end)
    ready, _, _ = select.select([verdict], [], [], max(0.0, deadline - time.monotonic()))
    passed, reason = False, "still running at the wall time limit"
    if ready:
        try:
            passed, reason = read_frame(verdict)
        except FrameError:
            reason = "what it returned was too much for its tests"
    status, cpu_seconds = _end(program, _ENDING_SECONDS if reason == ENDED else 0.0)
    _end(judging, 0.0)
    if not in_namespaces:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGKILL)
        shutil.rmtree(place, ignore_errors=True)
    if not passed and status is not None:
        reason = _reason_for_signal(status, cpu_seconds, job["cpu_seconds"]) or reason
    return {"passed": bool(passed), "reason": str(reason)}


def _end(process: int, seconds: float) -> tuple[int | None, float]:
    """End a child; return how it ended by itself within some seconds, and its CPU seconds.

    Returns:
        Its exit status, negative for a signal; None if it was killed here.
    """
    deadline = time.monotonic() + seconds
    ended, status, usage = os.wait4(process, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.001)
        ended, status, usage = os.wait4(process, os.WNOHANG)
    if not ended:
        os.kill(process, signal.SIGKILL)
        _, _, usage = os.wait4(process, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return code, usage.ru_utime + usage.ru_stime


def _reason_for_signal(code: int, cpu_seconds: float, limit: int) -> str | None:
    """Return which limit or signal ended a program, None if it ended otherwise."""
    # The kernel counts ticks of its clock, so on a busy machine the limit strikes early.
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_seconds > 0.5 * limit):
        return "CPU time limit"
    return f"killed by signal {-code}" if code < 0 else None


def _become_judge(
    job: Job, in_namespaces: bool, descriptors: tuple[int, int, int, int]
) -> typing.NoReturn:
    """Turn this fork into the judge's process.

    Args:
        job: the program.
        in_namespaces: whether the worker is in namespaces.
        descriptors: to read tests from, write calls to, read replies from, write the verdict to.
    """
    try:
        tests, calls, replies, verdict = isolation.detach(descriptors, "/")
        source = read_frame(tests)
        _restrict(job, in_namespaces, "/")
        write_frame(
            verdict, judge(source["reference"], source["test"], job["entry_point"], calls, replies)
        )
    finally:
        os._exit(0)


def _become_program(
    job: Job, in_namespaces: bool, place: str, descriptors: tuple[int, int]
) -> typing.NoReturn:
    """Turn this fork into the program's process.

    Args:
        job: the program.
        in_namespaces: whether the worker is in namespaces.
        place: its working folder.
        descriptors: to read calls from, to write replies to.
    """
    try:
        calls, replies = isolation.detach(descriptors, place)
        _restrict(job, in_namespaces, place)
        serve_calls(job["source"], job["entry_point"], calls, replies)
    finally:
        os._exit(0)


def _restrict(job: Job, in_namespaces: bool, place: str) -> None:
    isolation.limit_resources(
        job["cpu_seconds"], job["memory_bytes"], job["file_bytes"], children=in_namespaces
    )
    isolation.give_up_privileges(in_namespaces=in_namespaces)
    if not in_namespaces:
        isolation.refuse_by_audit_hook(place)


_NAME = re.compile(r"\w{1,60}")
ENDED = "ended before its tests did"
"""Reason of a program whose process was gone when the tests called it."""


class _ProgramEndedError(BaseException):
    """The program's process is gone; tests that catch Exception don't catch this."""


class ForwardedFunction:
    """Stands for the program's function in the tests.

    Args:
        calls: descriptor that calls are written to.
        replies: descriptor that replies are read from.

    Attributes:
        failure: why the program can't be called any more; None while it can.
    """

    def __init__(self, calls: int, replies: int) -> None:
        self._calls, self._replies = calls, replies
        self.failure: str | None = None

    def wait_until_loaded(self) -> None:
        """Wait until the program has been executed.

        Raises:
            _ProgramEndedError: it failed.
        """
        match self._read():
            case ["loaded"]:
                return
            case ["failed", name]:
                raise self._ended(f"raised {_clean(name)}")
            case _:
                raise self._ended(ENDED)

    def __call__(self, *positional: object, **keywords: object) -> Any:
        """Call the program's function; return what it returned, or raise what it raised."""
        if self.failure is not None:
            raise _ProgramEndedError
        try:
            write_frame(self._calls, encode([list(positional), keywords]))
        except FrameError:
            raise self._ended(ENDED) from None
        match self._read():
            case ["value", data]:
                try:
                    return decode(data)
                except FrameError:
                    raise self._ended("returned no value") from None
            case ["raised", builtin, _]:
                raise make_exception(builtin)
            case _:
                raise self._ended(ENDED)

    def _read(self) -> Any:
        try:
            return read_frame(self._replies)
        except FrameError:
            raise self._ended(ENDED) from None

    def _ended(self, reason: str) -> _ProgramEndedError:
        self.failure = reason
        return _ProgramEndedError()


def judge(reference: str, test: str, entry_point: str, calls: int, replies: int) -> list[Any]:
    """Run the tests of a program; return ``[whether it passed, reason]``.

    Args:
        reference: source that defines what the tests use beside the tested function.
        test: source that defines ``check``.
        entry_point: name that the tests may know the function by.
        calls, replies: descriptors of the program's process.
    """
    random.seed(0)
    function = ForwardedFunction(calls, replies)
    try:
        namespace: dict[str, Any] = {"__name__": "tests"}
        exec(compile(reference, "reference.py", "exec"), namespace)
        exec(compile(test, "tests.py", "exec"), namespace)
        function.wait_until_loaded()
        namespace[entry_point] = function
        namespace["check"](function)
    except BaseException as error:
        return [False, function.failure or f"raised {type(error).__name__}"]
    # A test with a bare "except" may have caught that the program ended.
    return [True, "passed"] if function.failure is None else [False, function.failure]


def _clean(name: object) -> str:
    """Return a name that the program chose, if it is one."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else "something"


def serve_calls(source: str, entry_point: str, calls: int, replies: int) -> None:
    """Execute a program, then answer calls of one of its functions until the judge is gone.

    Args:
        source: the program.
        entry_point: name of the function.
        calls: descriptor to read ``[positional, keyword arguments]`` from.
        replies: descriptor to write ``["loaded"]`` to, then ``["value", value]`` or
            ``["raised", builtin exception, exception]`` for each call. A program that fails to load
            sends ``["failed", exception]``.
    """
    random.seed(0)
    namespace: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except BaseException as error:
        write_frame(replies, ["failed", type(error).__name__])
        return
    if entry_point not in namespace:
        write_frame(replies, ["failed", "NameError"])
        return
    write_frame(replies, ["loaded"])
    while True:
        try:
            positional, keywords = decode(read_frame(calls))
        except FrameError:
            return
        write_frame(replies, _call(namespace[entry_point], positional, keywords))


def _call(
    function: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]
) -> list[Any]:
    try:
        return ["value", encode(function(*positional, **keywords))]
    except BaseException as error:
        return ["raised", exception_name(error), type(error).__name__]
