"""The judge: executes a program's tests; the program answers from another process.

The tests and the reference solution are trusted, what the program sends is not.
"""

import random
import re
from typing import Any

from midfill.lab.evaluation.sandbox.values import (
    FrameError,
    decode,
    encode,
    make_exception,
    read_frame,
    write_frame,
)

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
