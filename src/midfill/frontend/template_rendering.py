"""Chat templates rendered with Jinja, in a process that exists for it (``template_process``)."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 8_000_000
"""Of a rendered conversation: no prompt is as long."""


class BrokenTemplateError(Exception):
    """The template itself is at fault, whatever the messages are."""


def check_syntax(source: str) -> None:
    """Raise some exception if a template is not valid Jinja; nothing of it is run."""
    _environment().parse(source)


def render(source: str, variables: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt as text, up to where the assistant's turn begins.

    Raises:
        BrokenTemplateError: the template can't be compiled.
        Exception: anything that a template can raise.
    """
    template, length, pieces = _compile(source), 0, []
    for piece in template.generate(**variables, messages=messages, add_generation_prompt=True):
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


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
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
