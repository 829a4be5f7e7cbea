"""ChatTemplate: a conversation rendered to one prompt by the checkpoint's own Jinja template.

A template is a program of whoever made the model, so it runs in a process of its own
(``template_worker``), which may be ended.
"""

import atexit
import contextlib
import json
import logging
import math
import os
import re
import secrets
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from midfill.errors import InvalidRequestError, RateLimitError
from midfill.frontend.prompt import Message
from midfill.frontend.template_worker import describe, read_names
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.system.python_child import python_command, python_environment

_log = logging.getLogger(__name__)


_WORKER = "midfill.frontend.template_worker"


_MAX_SECONDS = 30.0  # of real time, if the kernel doesn't count time of computing


_MAX_FAILURES = 3
_PIECE = 1 << 16  # characters, more than any special token has
_FAILURE_SECONDS = 60.0  # in which a tenant may cause so many


_OWN_VARIABLES = "MIDFILL_"  # keys among them


class ChatTemplate:
    """Renders messages and encodes them.

    The template's own special tokens become token ids. What looks like one inside a message stays
    text, so that no user can end a turn and speak as another role.

    Args:
        source: the Jinja template.
        tokenizer: the model's.
        variables: more names the template may use, such as bos_token.

    A template that is not valid Jinja refuses every conversation, so that a model with a broken one
    still serves completions.

    Attributes:
        names: that the template reads, such as ``tools``.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, variables: Mapping[str, str]) -> None:
        self._fault = ""
        self.names: frozenset[str] = frozenset()
        try:
            self.names = read_names(source)
        except Exception as error:  # not only TemplateError: deep nesting exceeds Python's limits
            self._fault = describe(error)
            _log.warning("the model's chat template is broken: %s", self._fault)
        self._template = ProcessTemplate(source, variables)
        self._tokenizer = tokenizer
        self._special = _any_of(tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tenant: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a tenant as text, up to where the assistant's turn begins.

        Args:
            messages: the conversation.
            tenant: whose it is.
            fields: what the template may read beside it: JSON, such as ``tools``.

        Raises:
            InvalidRequestError: the template is broken, raises for these messages, or takes too
                much time or memory for them.
            RateLimitError: it has taken too much several times of late for this tenant.
        """
        if self._fault:
            raise refused("is broken", self._fault)
        try:
            rendered = self._template.render(list(map(dict, messages)), tenant, fields)
        except RecursionError:
            raise refused("refuses these messages", "they are nested too deeply") from None
        try:
            rendered.encode()  # half a surrogate pair can't be tokenised
        except UnicodeEncodeError as error:
            raise refused("refuses these messages", describe(error)) from error
        return rendered

    def encode(
        self,
        messages: Sequence[Message],
        tenant: str = "",
        check_characters: Callable[[int], None] = lambda _: None,
        fields: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the rendered conversation.

        Args:
            messages: the conversation.
            tenant: whose it is.
            check_characters: refuses a rendered text that is too long to be tokenised.
            fields: see ``render``.

        Raises:
            InvalidRequestError, RateLimitError: see ``render``; what ``check_characters`` raises.
        """
        hidden: dict[str, str] = {}
        nonce = secrets.token_hex(8)

        def hide(match: re.Match[str]) -> str:
            placeholder = f"\ue000{nonce}-{len(hidden)}\ue001"
            hidden[placeholder] = match.group()
            return placeholder

        if self._special is not None:
            replace = partial(_replaced, self._special, hide)
            try:
                messages = [_with_texts(message, replace) for message in messages]
                fields = _with_texts(fields or {}, replace)
            except RecursionError:
                raise refused("refuses these messages", "they are nested too deeply") from None
        rendered = self.render(messages, tenant, fields)
        check_characters(len(rendered))
        encode = self._tokenizer.encode
        if not hidden:
            return encode(rendered, parse_special=True)
        ids: list[int] = []
        for piece in re.split(f"(\ue000{nonce}-\\d+\ue001)", rendered):
            if piece in hidden:
                ids += encode(hidden[piece])
            elif piece:
                ids += encode(piece, parse_special=True)
        return ids


def count_characters(values: Sequence[object]) -> int:
    """Return the length of all texts in some JSON values, but for the names of fields."""
    count, left = 0, list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list):
            left += value
    return count


def _with_texts(fields: Mapping[str, Any], replace: Callable[[str], str]) -> dict[str, Any]:
    """Return fields with all texts of their values replaced, the names in these among them."""

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return replace(value)
        if isinstance(value, dict):
            return {replace(name): replaced(inner) for name, inner in value.items()}
        return list(map(replaced, value)) if isinstance(value, list) else value

    return {name: replaced(value) for name, value in fields.items()}


def _replaced(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> str:
    """Return ``pattern.sub(replace, text)``, searched in pieces so that other threads can run."""
    pieces, copied, start = [], 0, 0
    while start < len(text):
        # A match that begins in this piece ends in it or in the next.
        match = pattern.search(text, start, start + 2 * _PIECE)
        if match is None or match.start() >= start + _PIECE:
            start += _PIECE
            continue
        pieces += [text[copied : match.start()], replace(match)]
        copied = start = match.end()
    return "".join([*pieces, text[copied:]])


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of these texts, the longest first."""
    longest_first = sorted(filter(str.strip, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template that a model comes with; None if it has none."""
    if not tokenizer.chat_template:
        return None
    names = {
        "bos_token": tokenizer.bos_token_id,
        "eos_token": next(iter(tokenizer.eos_token_ids), None),
    }
    variables = {
        name: tokenizer.token_text(token_id)
        for name, token_id in names.items()
        if token_id is not None
    }
    return ChatTemplate(tokenizer.chat_template, tokenizer, variables)


class TemplateProcess:
    """Renders conversations, one at a time. Thread-safe.

    The process is started when it is first needed, again when it was ended, and ends with this
    one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, source: str, variables: Mapping[str, Any], messages: Sequence[Message]
    ) -> Mapping[str, str] | None:
        """Return the ``text``, or why it was ``refused`` or the template is ``broken``.

        None if it took too long or too much memory, and the process was ended.
        """
        line = json.dumps([source, variables, messages]).encode() + b"\n"
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(_MAX_SECONDS, process.kill)
            timer.start()
            answer = b""
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
                    answer = process.stdout.readline()
            finally:
                timer.cancel()
                if not answer.endswith(b"\n"):
                    self._end()
        return json.loads(answer) if answer.endswith(b"\n") else None

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            own = _OWN_VARIABLES
            inherited = {k: v for k, v in os.environ.items() if not k.startswith(own)}
            self._process = subprocess.Popen(
                python_command("-m", _WORKER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's to handle
                env=python_environment(inherited),
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(BrokenPipeError):  # what was not written yet
            process.communicate()


_process = TemplateProcess()
atexit.register(_process.close)


class ProcessTemplate:
    """A template that the one process of this program renders.

    Args:
        source: of the template.
        variables: more names that it may use.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._variables = dict(variables)
        self._clock = clock
        self._failures: dict[str, deque[float]] = {}  # when, the last ones of each tenant

    def render(
        self,
        messages: Sequence[Message],
        tenant: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt as text; see ``ChatTemplate.render``.

        Raises:
            InvalidRequestError: the template is broken, refuses these messages, or takes too long
                or too much memory.
            RateLimitError: it has done so several times of late for this tenant.
        """
        failures = self._failures.get(tenant, deque[float](maxlen=_MAX_FAILURES))
        left = _FAILURE_SECONDS - (self._clock() - failures[0]) if failures else 0.0
        if len(failures) == _MAX_FAILURES and left > 0:
            raise RateLimitError(
                f"the model's chat template has taken too long or too much memory {_MAX_FAILURES}"
                f" times; try again in {math.ceil(left)} s, or use /v1/completions",
                retry_after=math.ceil(left),
            )
        answer = _process.render(self._source, {**self._variables, **(fields or {})}, messages)
        if answer is None:
            failures.append(self._clock())
            self._failures[tenant] = failures
            raise refused("fails for these messages", "it takes too long or too much memory")
        if "broken" in answer:
            raise refused("is broken", answer["broken"])
        if "refused" in answer:
            raise refused("refuses these messages", answer["refused"])
        return answer["text"]


def refused(what: str, why: str) -> InvalidRequestError:
    """Return the error for a conversation that can't be rendered."""
    hint = "; use /v1/completions" if what == "is broken" else ""
    return InvalidRequestError(f"the model's chat template {what}: {why}{hint}", param="messages")
