"""Channels of an answer: what is meant for the reader, what is reasoning, what calls a function.

In the harmony format (OpenAI, "OpenAI Harmony Response Format", 2025) an answer is a sequence of
messages, each with a header that names its channel:

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

or, where the model calls a function,

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The recipient (``to=``) may stand with the role instead, and ``<|constrain|>`` may be missing.
Markers are tokens here, never text, so an answer that spells one out stays text. A prompt ends
inside of a header, mostly after the role, and the answer goes on there; where it goes on with text
and no marker, the model doesn't use the format, and all of it is content.

What becomes of a message:

- ``final``, ``commentary`` without a recipient, and no channel at all: content;
- a recipient ``functions.NAME``, whatever the channel: a call;
- ``analysis``, channels that are not known, and other recipients (tools that are built into the
  model's own environment): reasoning, since only ``final`` is promised to be fit to be shown.

Markers where none belong end a message's text or are left out; they are never shown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol


class Marker(Enum):
    """What a control token says; ``END`` ends a message, whatever comes next."""

    START = "start"
    CHANNEL = "channel"
    CONSTRAIN = "constrain"
    MESSAGE = "message"
    END = "end"
    CALL = "call"
    CALL_END = "call end"


Event = str | Marker
"""A part of an answer: text of any length, or a marker."""

Kind = Literal["content", "reasoning", "call"]

HARMONY: Mapping[str, Marker] = {
    "<|start|>": Marker.START,
    "<|channel|>": Marker.CHANNEL,
    "<|constrain|>": Marker.CONSTRAIN,
    "<|message|>": Marker.MESSAGE,
    "<|end|>": Marker.END,
    "<|return|>": Marker.END,
    "<|call|>": Marker.END,
}
"""The format's markers by the text of their tokens."""

_CONTENT_CHANNELS = ("final", "commentary", "")
_RECIPIENT = "to="
_FUNCTIONS = "functions."
_MAX_HEADER = 1024  # characters that are kept of a section; names of functions have up to 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message.

    Attributes:
        kind: what the message is.
        text: of it; "" in a call's first piece.
        name: of the function, in a call's first piece; "" in any other.
    """

    kind: Kind
    text: str
    name: str = ""


class AnswerParser(Protocol):
    """Divides one answer into pieces; joined, they don't depend on how the text is cut.

    Attributes:
        in_content: whether what was read last is content; None while that isn't known.
    """

    in_content: bool | None

    def push(self, event: Event) -> tuple[Piece, ...]:
        """Take the next part of the answer; return what it adds."""
        ...

    def finish(self) -> tuple[Piece, ...]:
        """Return what was held back, once the answer has ended."""
        ...


def trailing_overlap(text: str, tag: str) -> int:
    """Return how many characters of a text's end are a tag's beginning, but not all of it."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)


class ChannelParser:
    """Divides one answer into messages; see ``AnswerParser``.

    Messages of the same kind are joined by a line break, but for calls, which stay apart.

    Args:
        opening: the end of the prompt, from its last ``START`` on. Without one, an answer begins
            with a header.
    """

    def __init__(self, opening: Iterable[Event] = ()) -> None:
        self._header: dict[Marker, str] = {}
        self._section = Marker.START
        self._kind: Kind | None = None  # of the message; None in a header
        self._unmarked = False  # whether the answer has had no marker yet, after a whole role
        self._written: set[Kind] = set()
        self._breaks = False  # whether a line break goes before the message's text
        for event in opening:
            self.push(event)
        self._written, self._breaks = set(), False
        role = self._header.get(Marker.START, "")
        self._unmarked = self._kind is None and self._section is Marker.START and bool(role)
        if self._unmarked:  # the role stays known, apart from what the answer goes on with
            self._header = {Marker.END: role}
        self.in_content: bool | None = False

    def push(self, event: Event) -> tuple[Piece, ...]:
        """Take the next part of the answer; return what it adds."""
        pieces = self._mark(event) if isinstance(event, Marker) else self._read(event)
        shown = isinstance(event, str) and self._kind == "content"
        self.in_content = None if self._unmarked else shown
        return pieces

    def _read(self, event: str) -> tuple[Piece, ...]:
        if self._kind is not None:
            return self._add(self._kind, event)
        header = (self._header.get(self._section, "") + event)[:_MAX_HEADER]
        if self._unmarked and not _may_be_recipient(header):
            kept = self._header.get(self._section, "")
            self._kind, self._unmarked = "content", False
            return self._add("content", kept + event)
        self._header[self._section] = header
        return ()

    def finish(self) -> tuple[Piece, ...]:
        """Return what was held back, once the answer has ended; a header is dropped."""
        held = self._header.get(self._section, "")
        if not self._unmarked or held.lstrip().startswith(_RECIPIENT):
            return ()
        self._unmarked, self.in_content = False, True
        return self._add("content", held)

    def _mark(self, marker: Marker) -> tuple[Piece, ...]:
        self._unmarked = False
        if marker is Marker.MESSAGE:
            return self._open() if self._kind is None else ()
        if marker is Marker.CONSTRAIN:
            self._section = marker  # inside of a message there is no section that it could end
            return ()
        if marker is not Marker.CHANNEL or self._kind is not None:
            self._header = {}  # a channel goes on with the header that names the role
        self._kind = None
        self._section = Marker.CHANNEL if marker is Marker.CHANNEL else Marker.START
        return ()

    def _open(self) -> tuple[Piece, ...]:
        """Begin the message that the header describes."""
        words = [word for section in self._header.values() for word in section.split()]
        recipient = next((word for word in words if word.startswith(_RECIPIENT)), "")
        recipient = recipient.removeprefix(_RECIPIENT)
        named = self._header.get(Marker.CHANNEL, "").split()
        channel = next((word for word in named if not word.startswith(_RECIPIENT)), "")
        function = recipient.removeprefix(_FUNCTIONS)
        if function and function != recipient:
            self._kind, self._breaks = "call", False
            return (Piece("call", "", function),)
        shown = not recipient and channel in _CONTENT_CHANNELS
        self._kind = "content" if shown else "reasoning"
        self._breaks = self._kind in self._written
        return ()

    def _add(self, kind: Kind, text: str) -> tuple[Piece, ...]:
        if not text:
            return ()
        if self._breaks:
            text = "\n" + text
            self._breaks = False
        self._written.add(kind)
        return (Piece(kind, text),)


def _may_be_recipient(text: str) -> bool:
    """Return whether a text may be the beginning of a recipient, as far as it is known."""
    return _RECIPIENT.startswith(text.lstrip()[: len(_RECIPIENT)])


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is new in a call of a function.

    Attributes:
        index: which of the answer's calls.
        name: of the function, in a call's first piece; "" in any other.
        arguments: text of them; in most formats JSON, as far as the model keeps to it.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a function; see ``CallPiece``."""

    name: str
    arguments: str

    @classmethod
    def join(cls, pieces: Iterable[CallPiece]) -> "tuple[Call, ...]":
        """Return an answer's calls, put together from all their pieces."""
        names: list[str] = []
        arguments: list[list[str]] = []
        for piece in pieces:
            if piece.index == len(names):
                names.append(piece.name)
                arguments.append([])
            arguments[piece.index].append(piece.arguments)
        return tuple(
            cls(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)
        )


class ChannelReader:
    """Reads one answer: returns its content, and keeps what stands beside it until it is taken.

    Args:
        markers: the format's, by token id.
        parser: of the format, for this answer.

    Attributes:
        markers: the same.
    """

    def __init__(self, markers: Mapping[int, Marker], parser: AnswerParser) -> None:
        self.markers = markers
        self._parser = parser
        self._reasoning: list[str] = []
        self._calls: list[CallPiece] = []
        self._begun = 0  # calls

    @property
    def in_content(self) -> bool | None:
        """Whether what was read last is content; None while that isn't known."""
        return self._parser.in_content

    def read(self, event: Event) -> str:
        """Take the next part of the answer; return what it adds to the content."""
        return self._sorted(self._parser.push(event))

    def finish(self) -> str:
        """Return what was held back of the content, once the answer has ended."""
        return self._sorted(self._parser.finish())

    def take(self) -> tuple[str, tuple[CallPiece, ...]]:
        """Return the reasoning and the calls that were read since this was last called."""
        reasoning, calls = "".join(self._reasoning), tuple(self._calls)
        self._reasoning.clear()
        self._calls.clear()
        return reasoning, calls

    def _sorted(self, pieces: Iterable[Piece]) -> str:
        content = ""
        for piece in pieces:
            if piece.kind == "content":
                content += piece.text
            elif piece.kind == "reasoning":
                self._reasoning.append(piece.text)
            else:
                self._begun += bool(piece.name)
                self._calls.append(CallPiece(self._begun - 1, piece.name, piece.text))
        return content
