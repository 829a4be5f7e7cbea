"""Think tags: answers of models that reason between two tags before they answer.

    <think>reasoning</think>content

Some chat templates write the opening tag themselves, at the end of the prompt; the answer begins
inside of it then. Blanks around reasoning, and before the content that follows it, are layout and
left out. Reasoning that is never closed, as where ``max_tokens`` cuts it off, is all reasoning.
Models reason once, at the start: later tags are text like any other, and so is a closing one
without an opening one.

Where the vocabulary has tokens for both tags, these are the tags, and an answer that spells one
out stays text; elsewhere the tags are found in the text, however tokens divide them.
"""

import re
from dataclasses import dataclass
from typing import Literal

from midfill.frontend.channels import Event, Kind, Marker, Piece, trailing_overlap


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """A pair of tags, by their text."""

    opening: str
    closing: str


TAGS = (
    ThinkTags("<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3 and most others
    ThinkTags("[THINK]", "[/THINK]"),  # Magistral
    ThinkTags("<seed:think>", "</seed:think>"),  # Seed-OSS
)


class ThinkParser:
    """Divides one answer into reasoning and content; see ``AnswerParser``.

    Args:
        tags: the model's.
        spelled: whether to find the tags in the text. Otherwise they are markers: ``START`` opens,
            ``END`` closes.
        opened: whether the prompt ends with the opening tag.
    """

    def __init__(self, tags: ThinkTags, *, spelled: bool, opened: bool) -> None:
        self._texts = {Marker.START: tags.opening, Marker.END: tags.closing}
        self._markers = {text: marker for marker, text in self._texts.items()}
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        self._spelled = spelled
        self._part: Literal["before", "reasoning", "after", "content"]
        self._part = "reasoning" if opened else "before"
        self._written = False  # whether there is reasoning
        self._blanks = ""  # that are text only if more text follows
        self._partial = ""  # beginning of a tag at the end of the text
        self.in_content: bool | None = False

    def push(self, event: Event) -> tuple[Piece, ...]:
        """Take the next part of the answer; return what it adds."""
        finds = self._spelled and self._part != "content"
        events = self._split(event) if finds and isinstance(event, str) else [event]
        pieces = [piece for each in events for piece in self._read(each)]
        if self._part == "content" and self._partial:  # no tag counts any more
            pieces += self._add("content", self._partial)
            self._partial = ""
        self.in_content = None if self._part == "before" else self._part == "content"
        return tuple(pieces)

    def finish(self) -> tuple[Piece, ...]:
        """Return what was held back, once the answer has ended."""
        pieces = self._read(self._partial)
        self._partial = ""
        if self._part == "before":
            pieces += self._add("content", self._blanks)
            self._part = "content"
        self.in_content = self._part == "content"
        return tuple(pieces)

    def _split(self, text: str) -> list[Event]:
        """Return a text with its tags as markers, without a tag's beginning at its end."""
        events: list[Event] = []
        text, copied = self._partial + text, 0
        for match in self._pattern.finditer(text):
            events += [text[copied : match.start()], self._markers[match.group()]]
            copied = match.end()
        rest = text[copied:]
        partial = max(trailing_overlap(rest, tag) for tag in self._markers)
        self._partial = rest[len(rest) - partial :]
        return [*events, rest[: len(rest) - partial]]

    def _read(self, event: Event) -> list[Piece]:
        match self._part, event:
            case "before", Marker.START:
                self._part, self._blanks = "reasoning", ""
                return []
            case "reasoning", Marker.START if not self._written:
                return []  # the prompt has opened it already
            case "reasoning", Marker.END:
                self._part, self._blanks = "after", ""
                return []
        text = self._texts[event] if isinstance(event, Marker) else event
        if self._part == "content":
            return self._add("content", text)
        text, self._blanks = self._blanks + text, ""
        if self._part == "reasoning":
            text = text if self._written else text.lstrip()
            shown = text.rstrip()
            self._blanks = text[len(shown) :]
            self._written = self._written or bool(shown)
            return self._add("reasoning", shown)
        if not text.strip():
            self._blanks = text
            return []
        text = text if self._part == "before" else text.lstrip()
        self._part = "content"
        return self._add("content", text)

    def _add(self, kind: Kind, text: str) -> list[Piece]:
        return [Piece(kind, text)] if text else []
