"""The process that renders chat templates: requests and answers are lines of JSON.

A template is a program by whoever made the model. Jinja's sandbox keeps it from reaching out, but
not from going on for ever or from filling the memory. So the kernel ends this process when one
conversation takes too long, and gives it no more than so much memory; see ``frontend.chat``.
"""

import datetime
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 1.0
"""Of one conversation; common templates take milliseconds for long ones."""


MEMORY_BYTES = 1 << 30


MAX_CHARACTERS = 8_000_000
"""Of a rendered conversation: no prompt is as long."""


class BrokenTemplateError(Exception):
    """The template itself is at fault, whatever the messages are."""


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
    with suppress(ValueError, OSError):  # macOS takes no such limit below what is mapped already
        resource.setrlimit(resource.RLIMIT_AS, (allowed, most))


def read_names(source: str) -> frozenset[str]:
    """Return the names that a template reads; nothing of it is run.

    Compiling it is no part of this, since Jinja then computes what is constant.

    Raises:
        Exception: the template is not valid Jinja.
    """
    names = _environment().parse(source).find_all(nodes.Name)
    return frozenset(name.name for name in names if name.ctx == "load")


def render(source: str, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt as text, up to where the assistant's turn begins.

    Raises:
        BrokenTemplateError: the template can't be compiled.
        Exception: anything that a template can raise.
    """
    template, length, pieces = _compile(source), 0, []
    given = {**variables, "messages": messages, "add_generation_prompt": True}
    for piece in template.generate(given):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"it writes more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=4)
def _compile(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except Exception as error:  # not only TemplateError: deep nesting exceeds Python's limits
        raise BrokenTemplateError(describe(error)) from error


def describe(error: Exception) -> str:
    """Return an exception's message on one line, or its kind if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """``{% generation %}``, with which templates mark for training what a model is to write."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what the block holds: a prompt is the same without it."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


if __name__ == "__main__":
    main()
