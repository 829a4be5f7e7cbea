"""llama.vim and llama.vscode: 256 and 64 lines, a ring of chunks, and requests made in advance.

From llama.vim a1c8e6e (autoload/llama.vim) and llama.vscode v0.0.63 (src/completion.ts,
src/extra-context.ts). Once there is a hint, both ask for what would follow if it were accepted, so
requests for two versions of the document alternate. Answers are remembered by the text around the
caret.

The model is shown a ring of chunks beside the document. A chunk is about 32 lines of what the user
has seen. It is queued when it is picked, and moves into the ring when the user pauses; the ring
then holds at most 16, the oldest leaves.

Sessions have no clock. Where the user goes elsewhere, a file has been saved, and there is time for
two chunks to move into the ring; within typing there is a pause for one at every thirtieth request.
Each change of the ring is announced by a request without text, for the idle server to prepare.
"""

import json
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.plugins.clients import Asking, Sent, last_lines
from midfill_lab.bench.editing import Round

_CHUNKS, _QUEUED = 16, 16
CHUNK_LINES = 64  # half of them are taken
_WORDS = re.compile(r"\W+")

Similarity = Callable[[Sequence[str], Sequence[str]], float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines of a file."""

    lines: tuple[str, ...]
    filename: str


class Ring:
    """The ring of one session.

    Args:
        generator: where in a text chunks are taken.
        similarity: how similar two chunks are; from 0.9 on the older one leaves.
    """

    def __init__(self, generator: random.Random, similarity: Similarity) -> None:
        self.chunks: list[Chunk] = []
        self._queued: list[Chunk] = []
        self._random = generator
        self._similarity = similarity

    def pick(self, lines: Sequence[str], filename: str, *, evict: bool) -> None:
        """Queue a part of a text, unless there is one like it and ``evict`` is not set."""
        if len(lines) < 3:
            return
        if len(lines) + 1 >= CHUNK_LINES:
            half = CHUNK_LINES // 2
            start = self._random.randint(0, max(0, len(lines) - half))
            lines = lines[start : start + half]
        chunk = Chunk(tuple(lines), filename)
        if any(chunk.lines == other.lines for other in (*self.chunks, *self._queued)):
            return
        for held in (self._queued, self.chunks):
            similar = [other for other in held if self._similarity(other.lines, chunk.lines) > 0.9]
            if similar and not evict:
                return
            held[:] = [other for other in held if other not in similar]
        self._queued = [*self._queued, chunk][-_QUEUED:]

    def update(self) -> bool:
        """Move a queued chunk into the ring; return whether there was one."""
        if not self._queued:
            return False
        self.chunks = [*self.chunks, self._queued.pop(0)][-_CHUNKS:]
        return True

    def evict_similar(self, lines: Sequence[str]) -> None:
        """Drop chunks that are much like what is around the caret."""
        self.chunks = [
            other for other in self.chunks if self._similarity(other.lines, lines) <= 0.5
        ]

    def extra(self) -> list[dict[str, object]]:
        """Return ``input_extra``."""
        return [
            {"text": "\n".join(other.lines) + "\n", "time": 0, "filename": other.filename}
            for other in self.chunks
        ]


def common_words(one: Sequence[str], other: Sequence[str]) -> float:
    """Return llama.vim's similarity: the share of words that both have."""
    first, second = _WORDS.split("\n".join(one)), _WORDS.split("\n".join(other))
    known = set(first)
    return 2 * sum(word in known for word in second) / (len(first) + len(second))


def common_lines(one: Sequence[str], other: Sequence[str]) -> float:
    """Return llama.vscode's: the share of lines that both have, each counted once."""
    first, second = Counter(set(one)), Counter(set(other))
    return (first & second).total() / ((first | second).total() or 1)


_PREFIX_LINES, _SUFFIX_LINES, _SCOPE_LINES = 256, 64, 1024
_PATH = "/infill"
_MAX_AFTER = 8  # characters after the caret in its line, where the plugins ask by themselves
_MOVED = 32  # lines after which chunks are picked anew
_PAUSE = 1 / 30


@dataclass(frozen=True, slots=True)
class Place:
    """The text around a caret, as the plugins send it."""

    prefix: str
    middle: str
    suffix: str

    @property
    def key(self) -> tuple[str, str]:
        """By what its answer is remembered."""
        return self.prefix + self.middle, self.suffix


class LlamaPlugin(ABC):
    """What both have in common; without ``snippets`` the ring is turned off.

    Attributes:
        ring: its chunks.
    """

    fields: ClassVar[Mapping[str, object]]

    def __init__(self, *, snippets: bool = True, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.ring = Ring(self._random, self.similarity)
        self._snippets = snippets
        self._answers: dict[tuple[str, str], str] = {}
        self._picked_at = -9999
        self._last: Round | None = None

    def ask(self, edit: Round, answer: str) -> Asking:
        if self._snippets:
            yield from self._turn_ring(edit)
        self._last = edit
        after = edit.suffix.partition("\n")[0]
        if len(after) > _MAX_AFTER:
            return
        place = self.place(edit)
        hint = self._remembered(place)
        if self._asks(place, hint):
            if self._snippets:
                self.before_asking(edit)
            hint = _content((yield self._request(place, edit, answer)))
            self._remember(place, hint)
            self._pick_around(edit)
        if hint and not after.strip():
            accepted = _accepted(place, hint)
            if accepted.key not in self._answers:
                body = yield self._request(accepted, edit, "")
                self._remember(accepted, _content(body))

    @property
    @abstractmethod
    def similarity(self) -> Similarity:
        """How similar it takes two chunks to be."""

    @abstractmethod
    def _asks(self, place: Place, hint: str | None) -> bool:
        """Return whether the server is asked where this hint is known already."""

    @abstractmethod
    def place(self, edit: Round) -> Place:
        """Return the text around the caret, as it is sent."""

    @abstractmethod
    def before_asking(self, edit: Round) -> None:
        """Do with the ring what precedes a request."""

    def _request(self, place: Place, edit: Round, answer: str) -> Sent:
        line = place.middle + edit.suffix.partition("\n")[0]
        indent = len(line) - len(line.lstrip()) if line.strip() else 0
        body = {
            "id_slot": 0,
            "input_prefix": place.prefix,
            "input_suffix": place.suffix,
            "input_extra": self.ring.extra(),
            "prompt": place.middle,
            "n_predict": 128,
            "n_indent": indent,
            "stream": False,
            "cache_prompt": True,
            "samplers": ["top_k", "top_p", "infill"],
            **self.fields,
        }
        return Sent(_PATH, body, answer)

    def _remember(self, place: Place, hint: str) -> None:
        """Remember an answer, also for windows that begin up to three lines later."""
        prefix = place.prefix
        for _ in range(4):
            self._answers[prefix + place.middle, place.suffix] = hint
            _, _, prefix = prefix.partition("\n")

    def _remembered(self, place: Place) -> str | None:
        """Return a hint that is known here, or the rest of one that was typed since."""
        text, suffix = place.key
        if (known := self._answers.get((text, suffix))) is not None:
            return known
        for count in range(1, min(len(place.middle), 128) + 1):
            known = self._answers.get((text[:-count], suffix), "")
            if known.startswith(text[-count:]) and len(known) > count:
                return known[count:]
        return None

    # The ring

    def _turn_ring(self, edit: Round) -> Asking:
        updates = int(self._random.random() < _PAUSE)
        last = self._last
        if edit.kind in ("open", "switch", "jump"):
            updates = 2
            for seen in (last, edit):
                if seen is not None:
                    self.ring.pick(_around(seen), seen.document, evict=True)
        for _ in range(updates):
            if self.ring.update():
                yield Sent(_PATH, self._announcement())

    def _announcement(self) -> dict[str, object]:
        return {
            "id_slot": 0,
            "input_prefix": "",
            "input_suffix": "",
            "input_extra": self.ring.extra(),
            "prompt": "",
            "n_predict": 0,
            "samplers": [],
            "cache_prompt": True,
        }

    def _pick_around(self, edit: Round) -> None:
        """Pick chunks from beyond the window, if the caret is far from where it was done last."""
        line = edit.prefix.count("\n")
        if not self._snippets or abs(line - self._picked_at) <= _MOVED:
            return
        lines = (edit.prefix + edit.suffix).split("\n")
        before = lines[max(0, line - _SCOPE_LINES) : max(0, line - _PREFIX_LINES) + 1]
        first = line + _SUFFIX_LINES
        self.ring.pick(before, edit.document, evict=False)
        self.ring.pick(lines[first : first + CHUNK_LINES + 1], edit.document, evict=False)
        self._picked_at = line


class LlamaVim(LlamaPlugin):
    """llama.vim: asks wherever it has no answer for exactly this text."""

    fields: ClassVar[Mapping[str, object]] = {
        "top_k": 40,
        "top_p": 0.9,
        "response_fields": ["content"],
        "model": "",
    }

    def _asks(self, place: Place, hint: str | None) -> bool:
        return place.key not in self._answers

    @property
    def similarity(self) -> Similarity:
        return common_words

    def place(self, edit: Round) -> Place:
        before, after = edit.prefix.rpartition("\n")[2], edit.suffix.partition("\n")[0]
        blank = not (before + after).strip()
        return _place(edit, "" if blank else before, "" if blank else after)

    def before_asking(self, edit: Round) -> None:
        around = _around(edit)
        half = CHUNK_LINES // 2
        start = self._random.randint(0, max(0, len(around) - half))
        self.ring.evict_similar(around[start : start + half])


class LlamaVscode(LlamaPlugin):
    """llama.vscode: three completions; does not ask while a hint is typed."""

    fields: ClassVar[Mapping[str, object]] = {"n_cmpl": 3, "top_k": 40, "top_p": 0.99}

    def _asks(self, place: Place, hint: str | None) -> bool:
        return hint is None

    @property
    def similarity(self) -> Similarity:
        return common_lines

    def place(self, edit: Round) -> Place:
        before, after = edit.prefix.rpartition("\n")[2], edit.suffix.partition("\n")[0]
        return _place(edit, before if before.strip() else "", after)

    def before_asking(self, edit: Round) -> None:
        pass


def _place(edit: Round, before: str, after: str) -> Place:
    """Return the lines around the caret's own, which is given."""
    above = last_lines(edit.prefix, _PREFIX_LINES).split("\n")[:-1]
    below = edit.suffix.split("\n")[1 : _SUFFIX_LINES + 1]
    return Place("\n".join(above) + "\n", before, f"{after}\n" + "\n".join(below) + "\n")


def _accepted(place: Place, hint: str) -> Place:
    """Return the place after a hint is accepted at a line's end."""
    *above, last = (place.prefix + place.middle + hint).split("\n")
    suffix = "\n" + place.suffix.partition("\n")[2]
    return Place("\n".join(above[-_PREFIX_LINES:]) + "\n", last, suffix)


def _around(edit: Round) -> list[str]:
    """Return the lines around the caret, half a chunk's on each side."""
    lines, line = (edit.prefix + edit.suffix).split("\n"), edit.prefix.count("\n")
    half = CHUNK_LINES // 2
    return lines[max(0, line - half) : line + half + 1]


def _content(body: str) -> str:
    """Return the first completion of a response, without line breaks at its end."""
    found = json.loads(body)
    first = found[0] if isinstance(found, list) else found
    return str(first["content"]).rstrip("\n")
