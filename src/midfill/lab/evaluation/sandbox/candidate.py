"""The program's process: executes a program and answers calls of its function.

Everything here, and every message it sends, is in the program's hands.
"""

import random
from collections.abc import Callable
from typing import Any

from midfill.lab.evaluation.sandbox.values import (
    FrameError,
    decode,
    encode,
    exception_name,
    read_frame,
    write_frame,
)


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
