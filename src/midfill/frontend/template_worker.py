"""The process that renders chat templates: requests and answers are lines of JSON.

A template is a program by whoever made the model. Jinja's sandbox keeps it from reaching out, but
not from going on for ever or from filling the memory. So the kernel ends this process when one
conversation takes too long, and gives it no more than so much memory; see ``template_process``.
"""

import json
import signal
import sys
from typing import BinaryIO

from midfill.frontend.template_rendering import BrokenTemplateError, describe, render

CPU_SECONDS = 1.0
"""Of one conversation; common templates take milliseconds for long ones."""

MEMORY_BYTES = 1 << 30


def main() -> None:
    """Answer requests until there are no more."""
    _limit_memory()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for line in requests:
        _answer(line, answers)


def _answer(line: bytes, answers: BinaryIO) -> None:
    _limit_time(CPU_SECONDS)
    answer: dict[str, str]
    try:
        answer = {"text": render(*json.loads(line))}
    except BrokenTemplateError as error:
        answer = {"broken": describe(error)}
    except MemoryError:
        sys.exit(1)
    except Exception as error:  # a template can raise anything, ZeroDivisionError for one
        answer = {"refused": describe(error)}
    encoded = json.dumps(answer).encode() + b"\n"
    _limit_time(0)
    answers.write(encoded)
    answers.flush()


def _limit_time(seconds: float) -> None:
    """Have the kernel end this process after so much time of computing; 0: never."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # texts are in it
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, most))


if __name__ == "__main__":
    main()
