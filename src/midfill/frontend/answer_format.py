"""The format of a model's answers to chats: what tells reasoning and calls from their content.

It is known by the model's vocabulary and its chat template, never by a name:

- harmony (``channels``), if the vocabulary has the format's tokens and the template writes them;
- think tags (``think_tags``), if the template writes a pair's tags, or looks for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from midfill.frontend.channels import (
    HARMONY,
    AnswerParser,
    ChannelParser,
    ChannelReader,
    Event,
    Marker,
)
from midfill.frontend.think_tags import TAGS, ThinkParser, ThinkTags
from midfill.models.tokens.tokenizer import Tokenizer

_TAIL = 32  # tokens, more than a tag and the blanks after it have


@dataclass(frozen=True, slots=True)
class AnswerChannels:
    """What reads the answers to one prompt.

    Attributes:
        markers: the format's, by token id.
        parser: returns the parser of one answer.
    """

    markers: Mapping[int, Marker]
    parser: Callable[[], AnswerParser]

    def reader(self) -> ChannelReader:
        """Return what reads one answer."""
        return ChannelReader(self.markers, self.parser())


@dataclass(frozen=True)
class HarmonyFormat:
    """Answers in channels.

    Attributes:
        has_calls: whether calls of functions are told from the content.
    """

    tokenizer: Tokenizer
    markers: Mapping[int, Marker]
    has_calls: ClassVar[bool] = True

    @classmethod
    def of_model(cls, tokenizer: Tokenizer) -> "HarmonyFormat | None":
        """Return the format if the model has it."""
        known, template = tokenizer.special_tokens, tokenizer.chat_template or ""
        starts = (text for text, marker in HARMONY.items() if marker is Marker.START)
        if not all(text in known for text in HARMONY) or not any(map(template.count, starts)):
            return None
        return cls(tokenizer, {known[text]: marker for text, marker in HARMONY.items()})

    def channels(self, prompt: Sequence[int]) -> AnswerChannels | None:
        """Return what reads the answers to a prompt; None if no message is begun there."""
        starts = {each for each, marker in self.markers.items() if marker is Marker.START}
        after = range(len(prompt) - 1, -1, -1)
        last = next((place for place in after if prompt[place] in starts), None)
        if last is None:
            return None
        opening: list[Event] = []
        text: list[int] = []
        for token_id in prompt[last:]:
            if token_id not in self.markers:
                text.append(token_id)
                continue
            opening += [self.tokenizer.decode(text), self.markers[token_id]]
            text = []
        opening.append(self.tokenizer.decode(text))
        return AnswerChannels(self.markers, partial(ChannelParser, tuple(opening)))


@dataclass(frozen=True)
class ThinkFormat:
    """Answers that begin with reasoning between tags.

    Attributes:
        tags: the model's.
        markers: their tokens, by id; none if the vocabulary lacks one of them.
        has_calls: see ``HarmonyFormat``.
    """

    tokenizer: Tokenizer
    tags: ThinkTags
    markers: Mapping[int, Marker] = field(default_factory=dict)
    has_calls: ClassVar[bool] = False

    @classmethod
    def of_model(cls, tokenizer: Tokenizer) -> "ThinkFormat | None":
        """Return the format if the model has it."""
        known, template = tokenizer.special_tokens, tokenizer.chat_template or ""
        for tags in TAGS:
            if tags.opening in template or tags.closing in template:
                texts = {tags.opening: Marker.START, tags.closing: Marker.END}
                has_tokens = all(text in known for text in texts)
                markers = {known[text]: texts[text] for text in texts} if has_tokens else {}
                return cls(tokenizer, tags, markers)
        return None

    def channels(self, prompt: Sequence[int]) -> AnswerChannels:
        """Return what reads the answers to a prompt."""
        parser = partial(
            ThinkParser, self.tags, spelled=not self.markers, opened=self._is_opened(prompt)
        )
        return AnswerChannels(self.markers, parser)

    def _is_opened(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the opening tag, but for blanks."""
        written = b""  # after what can't be a part of the tag
        for token_id in reversed(prompt[-_TAIL:]):
            if token_id in self.markers:
                return not written.strip() and self.markers[token_id] is Marker.START
            if not (text := self.tokenizer.token_bytes(token_id)):
                break
            written = text + written
        opens = written.decode(errors="replace").rstrip().endswith(self.tags.opening)
        return opens and not self.markers


AnswerFormat = HarmonyFormat | ThinkFormat


def find_answer_format(tokenizer: Tokenizer) -> AnswerFormat | None:
    """Return the format of a model's answers to chats; None if all of them is content."""
    return HarmonyFormat.of_model(tokenizer) or ThinkFormat.of_model(tokenizer)
