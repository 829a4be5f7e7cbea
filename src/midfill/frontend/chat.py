"""ChatTemplate: a conversation rendered to one prompt by the checkpoint's own Jinja template."""

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence

from midfill.frontend.template_process import ProcessTemplate, refused
from midfill.frontend.template_rendering import check_syntax, describe
from midfill.models.tokens.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Message = Mapping[str, str]


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
    """

    def __init__(self, source: str, tokenizer: Tokenizer, variables: Mapping[str, str]) -> None:
        self._fault = ""
        try:
            check_syntax(source)
        except Exception as error:  # not only TemplateError: deep nesting exceeds Python's limits
            self._fault = describe(error)
            _log.warning("the model's chat template is broken: %s", self._fault)
        self._template = ProcessTemplate(source, variables)
        self._tokenizer = tokenizer
        self._special = _any_of(tokenizer.special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt as text, up to where the assistant's turn begins.

        Raises:
            InvalidRequestError: the template is broken, raises for these messages, or takes too
                much time or memory for them.
        """
        if self._fault:
            raise refused("is broken", self._fault)
        rendered = self._template.render([dict(message) for message in messages])
        try:
            rendered.encode()  # half a surrogate pair can't be tokenised
        except UnicodeEncodeError as error:
            raise refused("refuses these messages", describe(error)) from error
        return rendered

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the rendered conversation.

        Raises:
            InvalidRequestError: see ``render``.
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
