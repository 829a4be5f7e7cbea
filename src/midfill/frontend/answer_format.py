"""The format of a model's answers to chats: what tells reasoning and calls from their content.

It is known by the model's vocabulary and its chat template, never by a name:

- harmony (``channels``), if the vocabulary has the format's tokens and the template writes them;
- think tags (``think_tags``), if the template writes a pair's tags, or looks for them;
- tags of calls (``call_tags``), likewise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from midfill.frontend.call_tags import CLOSING, OPENING, CallParser
from midfill.frontend.call_tags import TAGS as CALL_TAGS
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
        has_reasoning: whether reasoning is told from the content.
        has_calls: whether calls of functions are.
    """

    tokenizer: Tokenizer
    markers: Mapping[int, Marker]
    has_reasoning: ClassVar[bool] = True
    has_calls: ClassVar[bool] = True

    @classmethod
    def of_model(cls, tokenizer: Tokenizer) -> "HarmonyFormat | None":
        """Return the format if the model has it."""
        known, template = tokenizer.special_tokens, tokenizer.chat_template or ""
        starts = (text for text, marker in HARMONY.items() if marker is Marker.START)
        if not all(text in known for text in HARMONY) or not any(map(template.count, starts)):
            return None
        return cls(tokenizer, {known[text]: marker for text, marker in HARMONY.items()})

    def channels(
        self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> AnswerChannels | None:
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
class TagFormat:
    """Answers in which reasoning, calls, or both stand between tags.

    Attributes:
        think: the tags of reasoning that an answer begins with, if the model has them.
        has_calls: see ``HarmonyFormat``.
        markers: tokens of tags, by id: those of ``think``, if the vocabulary has both, and those of
            calls that have no text.
    """

    tokenizer: Tokenizer
    think: ThinkTags | None
    has_calls: bool
    markers: Mapping[int, Marker] = field(default_factory=dict)

    @property
    def has_reasoning(self) -> bool:
        """See ``HarmonyFormat``."""
        return self.think is not None

    @classmethod
    def of_model(cls, tokenizer: Tokenizer) -> "TagFormat | None":
        """Return the format if the model has it."""
        known, template = tokenizer.special_tokens, tokenizer.chat_template or ""
        think = next((t for t in TAGS if t.opening in template or t.closing in template), None)
        has_calls = OPENING in template and CLOSING in template
        if think is None and not has_calls:
            return None
        markers = {}
        if think is not None and {think.opening, think.closing} <= known.keys():
            markers = {known[think.opening]: Marker.START, known[think.closing]: Marker.END}
        for text, marker in CALL_TAGS.items() if has_calls else ():
            if text in known and not tokenizer.token_bytes(known[text]):
                markers[known[text]] = marker
        return cls(tokenizer, think, has_calls, markers)

    def channels(
        self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> AnswerChannels | None:
        """Return what reads the answers to a prompt; None if all of them is content.

        Args:
            prompt: its tokens.
            tools: that may be called; without any, what looks like a call is text.
        """
        reads_calls = bool(tools) and self.has_calls
        if self.think is None and not reads_calls:
            return None
        spelled = Marker.START not in self.markers.values()
        opened = self._is_opened(prompt, spelled=spelled)

        def parser() -> AnswerParser:
            inner = None
            if self.think is not None:
                inner = ThinkParser(self.think, spelled=spelled, opened=opened)
            if reads_calls:
                return CallParser(inner, tools)
            assert inner is not None
            return inner

        markers = {
            token_id: marker
            for token_id, marker in self.markers.items()
            if reads_calls or marker not in CALL_TAGS.values()
        }
        return AnswerChannels(markers, parser)

    def _is_opened(self, prompt: Sequence[int], *, spelled: bool) -> bool:
        """Whether a prompt ends with the opening tag of reasoning, but for blanks."""
        if self.think is None:
            return False
        written = b""  # after what can't be a part of the tag
        for token_id in reversed(prompt[-_TAIL:]):
            if token_id in self.markers:
                return not written.strip() and self.markers[token_id] is Marker.START
            if not (text := self.tokenizer.token_bytes(token_id)):
                break
            written = text + written
        opens = written.decode(errors="replace").rstrip().endswith(self.think.opening)
        return opens and spelled


AnswerFormat = HarmonyFormat | TagFormat


def find_answer_format(tokenizer: Tokenizer) -> AnswerFormat | None:
    """Return the format of a model's answers to chats; None if all of them is content."""
    return HarmonyFormat.of_model(tokenizer) or TagFormat.of_model(tokenizer)
