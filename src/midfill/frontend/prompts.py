"""Prompts: what clients send, as token ids: raw text, ids, the text around a caret, a chat."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from midfill.errors import InvalidRequestError
from midfill.frontend.chat import ChatTemplate, Message
from midfill.infill.formats import FimFormat, custom_format, find_format
from midfill.infill.layout import LayoutName
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest
from midfill.models.checkpoint import Checkpoint
from midfill.tokens.layout import LayoutEncoder
from midfill.tokens.tokenizer import Tokenizer

# A cautious guess: text remembered from earlier requests is not to fill the context.
_CHARACTERS_A_TOKEN = 2
_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """How a prompt was laid out; clients see it as the answer's ``midfill`` object.

    Attributes:
        layout: what was built.
        cut: characters of the prefix before the suffix in the prompt; None for a raw prompt.
        sentinels: whether the model has FIM tokens. Without, the suffix was not seen.
        document: the server's id of the document; None where none is kept.
    """

    layout: LayoutName
    cut: int | None
    sentinels: bool
    document: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine.

    Attributes:
        token_ids: never empty.
        text: what the client sent before the place to go on from, for echoing.
        report: how it was laid out; None for chats and token ids.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
    """

    token_ids: list[int]
    text: str
    report: LayoutReport | None = None
    stop_token_ids: tuple[int, ...] = ()


class PromptEncoder:
    """Makes prompts for one model. Remembers documents; call it from one thread at a time.

    Args:
        checkpoint: gives tokenizer and chat template.
        format: the model's FIM format, or None.
        context: most tokens of a prompt and its answer.

    Attributes:
        context: the same.
        format: the same.
    """

    def __init__(self, checkpoint: Checkpoint, format: FimFormat | None, context: int) -> None:
        self.context = context
        self.format = format
        self._tokenizer = checkpoint.tokenizer
        self._planner = Planner(
            format, PlannerOptions(max_prompt_characters=context * _CHARACTERS_A_TOKEN)
        )
        self._layouts = LayoutEncoder(checkpoint.tokenizer)
        self._chat = _chat_template(checkpoint.tokenizer)
        self._longest_token = _longest_token(checkpoint.tokenizer)

    def infill(self, request: InfillRequest) -> Prompt:
        """The prompt for a caret, or of a raw text (``request.raw``).

        Raises:
            InvalidRequestError: too long, empty, or a layout that doesn't fit the request.
        """
        self._refuse_oversized(len(request.prefix) + len(request.suffix))
        try:
            return self._planned(request)
        except InvalidRequestError as error:
            if error.code != _TOO_LONG or request.window == "as-sent":
                raise
            # What the planner added from earlier requests may be what was too much.
            return self._planned(dataclasses.replace(request, window="as-sent"))

    def _planned(self, request: InfillRequest) -> Prompt:
        layout = self._planner.plan(request)
        if layout.layout == "verbatim" and request.layout not in ("auto", "verbatim"):
            raise InvalidRequestError(
                f"midfill.layout {request.layout!r} needs a suffix, or a prompt that is the"
                " model's FIM format filled in",
                param="midfill.layout",
            )
        report = LayoutReport(
            layout=layout.layout,
            cut=None if layout.layout == "verbatim" else layout.cut,
            sentinels=self.format is not None,
            document=layout.document,
        )
        ids = self._layouts.encode(layout)
        return self._checked(Prompt(ids, request.prefix, report, layout.stop_token_ids))

    def raw(self, text: str) -> Prompt:
        """The prompt for a raw text; special tokens in it are parsed.

        Raises:
            InvalidRequestError: too long or empty.
        """
        return self.infill(InfillRequest(prefix=text, raw=True))

    def tokens(self, token_ids: Sequence[int]) -> Prompt:
        """The prompt of given token ids, sent as they are.

        Raises:
            InvalidRequestError: too many, none, or ids the model doesn't have.
        """
        self._checked(Prompt(list(token_ids), ""))
        vocab = self._tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab:
                raise InvalidRequestError(
                    f"prompt holds token id {str(token_id)[:24]}; "
                    f"this model's go from 0 to {vocab - 1}",
                    param="prompt",
                )
        return Prompt(list(token_ids), self._tokenizer.decode(token_ids))

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """The prompt of a conversation.

        Raises:
            InvalidRequestError: the model has no chat template, it refuses the messages, or they
                are too long.
        """
        if self._chat is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        self._refuse_oversized(
            sum(len(message.get("content", "")) for message in messages), "messages"
        )
        return self._checked(Prompt(self._chat.encode(messages), ""), "messages")

    def _refuse_oversized(self, characters: int, field: str = "prompt") -> None:
        """Refuse what can't fit before spending time on tokenising it."""
        if characters > self.context * self._longest_token:
            raise InvalidRequestError(
                f"{field} has {characters} characters; "
                f"this server's context is {self.context} tokens",
                param=field,
                code=_TOO_LONG,
            )

    def _checked(self, prompt: Prompt, field: str = "prompt") -> Prompt:
        count = len(prompt.token_ids)
        if count == 0:
            raise InvalidRequestError(f"{field} is empty", param=field)
        if count >= self.context:
            raise InvalidRequestError(
                f"{field} has {count} tokens; this server's context of {self.context} tokens "
                "leaves no room for an answer",
                param=field,
                code=_TOO_LONG,
            )
        return prompt


def fim_format(
    checkpoint: Checkpoint, fim_tokens: tuple[str, str, str] | None = None
) -> FimFormat | None:
    """A checkpoint's FIM format, or None where it has no sentinels that midfill knows.

    Args:
        checkpoint: the model.
        fim_tokens: the prefix, suffix and middle token, where the user names them.

    Raises:
        InvalidRequestError: a named token is none of the model's special tokens.
    """
    special_tokens = checkpoint.tokenizer.special_tokens
    if fim_tokens is not None:
        return custom_format(*fim_tokens, special_tokens)
    return find_format(checkpoint.config.family, special_tokens, checkpoint.metadata)


def _chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
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


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token: no text of more characters than that fits one token."""
    return max(
        max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)),
        max((len(text) for text in tokenizer.special_tokens), default=1),
    )
