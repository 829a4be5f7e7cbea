"""ChatTemplate: a conversation rendered to one prompt by the checkpoint's own Jinja template."""

import datetime
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from midfill.errors import CheckpointError, InvalidRequestError
from midfill.tokens.tokenizer import Tokenizer

Message = Mapping[str, str]


class ChatTemplate:
    """Renders messages and encodes them.

    The template's own special tokens become token ids; what looks like one inside a message stays
    text, so nobody can end their own turn and speak as another role.

    Args:
        source: the Jinja template.
        tokenizer: the model's.
        variables: more names the template may use, such as bos_token.

    Raises:
        CheckpointError: the template is no valid Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the model's chat template is broken: {error}") from error
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._special = _any_of(tokenizer.special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, up to where the assistant speaks.

        Raises:
            InvalidRequestError: the template refuses the messages.
        """
        try:
            return self._template.render(
                **self._variables, messages=[dict(message) for message in messages],
                add_generation_prompt=True,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered conversation.

        Raises:
            InvalidRequestError: the template refuses the messages.
        """
        hidden: dict[str, str] = {}
        nonce = secrets.token_hex(8)

        def hide(match: re.Match[str]) -> str:
            placeholder = f"\ue000{nonce}-{len(hidden)}\ue001"
            hidden[placeholder] = match.group()
            return placeholder

        if self._special is not None:
            special = self._special
            messages = [
                {name: special.sub(hide, value) for name, value in message.items()}
                for message in messages
            ]
        rendered = self.render(messages)
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


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of any of these texts, the longest first."""
    longest_first = sorted(filter(str.strip, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
