"""A simulated editor: files, a caret, undo, and the requests a completion plugin would send.

A session starts from files with blocks of lines cut out. The user goes from gap to gap and writes
the missing text again, with what comes in between: looking elsewhere, changes below the caret,
rewriting the end of a line, other files, and the habits of ``Editor``.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

RoundKind = Literal[
    "open", "type", "typo", "delete", "accept", "partial", "jump", "below", "undo", "switch"
]


@dataclass(frozen=True, slots=True)
class Round:
    """A request of an editor.

    Attributes:
        document: the file's name, for bookkeeping; it is not sent.
        prefix, suffix: the text around the caret.
        kind: what the user has just done.
        shown: the model's completion, as far as the session depends on it; its tokens were
            generated, so their KV can be in the cache.
    """

    document: str
    prefix: str
    suffix: str
    kind: RoundKind
    shown: str = ""


@dataclass(frozen=True, slots=True)
class Habits:
    """How the user writes a text; weights are relative to each other.

    Attributes:
        typing: a burst of keystrokes.
        typo: one to three wrong keys and the backspaces that remove them.
        rethink: deleting back some of what was written.
        accept, partial: taking a shown completion, or only its first words.
        undo: taking the last one to three changes back.
        burst: mean keystrokes between two requests.
        request_on_jump: share of caret moves that send a request by themselves.
    """

    typing: float = 70.0
    typo: float = 5.0
    rethink: float = 3.0
    accept: float = 8.0
    partial: float = 4.0
    undo: float = 2.0
    burst: float = 2.0
    request_on_jump: float = 0.5


@dataclass(slots=True)
class Writing:
    """A text being written; its first ``done`` characters are in the file."""

    text: str
    done: int = 0

    @property
    def rest(self) -> str:
        """What is still to be written."""
        return self.text[self.done :]


@dataclass(frozen=True, slots=True)
class _Change:
    """What undo needs to revert a change."""

    start: int
    inserted: int
    removed: str
    caret: int
    writing: Writing
    done: int


@dataclass(slots=True)
class OpenFile:
    """A file in the editor.

    Attributes:
        name, text, caret: its current state.
        gaps: (position, missing text) still to be written; positions follow the edits.
        writing: the text being written at the caret.
    """

    name: str
    text: str
    caret: int = 0
    gaps: list[tuple[int, str]] = field(default_factory=list)
    writing: Writing = field(default_factory=lambda: Writing(""))
    _changes: list[_Change] = field(default_factory=list)

    def replace(self, start: int, end: int, new: str, caret: int) -> None:
        """Replace text[start:end] by ``new`` and move the caret, so that undo can revert it."""
        self._changes.append(
            _Change(
                start, len(new), self.text[start:end], self.caret, self.writing, self.writing.done
            )
        )
        self.replace_for_good(start, end, new, caret)

    def replace_for_good(self, start: int, end: int, new: str, caret: int) -> None:
        """Replace text[start:end] by ``new`` and move the caret, unknown to undo."""
        shift = len(new) - (end - start)
        self.text = self.text[:start] + new + self.text[end:]
        self.caret = caret
        self.gaps = [
            (where + shift if where >= end else min(where, start), text)
            for where, text in self.gaps
        ]

    def undo(self) -> bool:
        """Revert the last change, with the caret; return False if there is none."""
        if not self._changes:
            return False
        change = self._changes.pop()
        end = change.start + change.inserted
        self.replace_for_good(change.start, end, change.removed, change.caret)
        self.writing, self.writing.done = change.writing, change.done
        return True

    def forget_changes(self) -> None:
        """Let undo revert nothing that was done before."""
        self._changes.clear()


class Editor:
    """One user with open files; ``rounds`` holds the requests that the editor has sent.

    Args:
        files: the open files, the current one first.
        habits: how the user writes.
        generator: of all random choices.
    """

    def __init__(self, files: Sequence[OpenFile], habits: Habits, generator: random.Random) -> None:
        self.files = list(files)
        self.file = self.files[0]
        self.rounds: list[Round] = []
        self._habits = habits
        self._random = generator

    def send(self, kind: RoundKind) -> None:
        """Request a completion at the caret."""
        file = self.file
        self.rounds.append(Round(file.name, file.text[: file.caret], file.text[file.caret :], kind))

    def go(self, caret: int) -> None:
        """Move the caret; a share of moves sends a request."""
        self.file.caret = caret
        if self._random.random() < self._habits.request_on_jump:
            self.send("jump")

    def erase(self, count: int, steps: Sequence[int]) -> None:
        """Delete backwards from the caret, some characters at a time."""
        file = self.file
        while count > 0:
            step = min(count, self._random.choice(steps))
            file.replace(file.caret - step, file.caret, "", file.caret - step)
            file.writing.done -= step
            count -= step
            self.send("delete")

    def write_some(self) -> None:
        """Continue ``file.writing`` with one action, drawn by habit."""
        habits = self._habits
        actions = {
            self._type: habits.typing,
            self._mistype: habits.typo,
            self._rethink: habits.rethink,
            self._accept: habits.accept,
            self._accept_partly: habits.partial,
            self._undo: habits.undo,
        }
        self._random.choices(list(actions), list(actions.values()))[0]()

    def _type(self) -> None:
        count = 1 + int(self._random.expovariate(1 / (self._habits.burst - 0.5)))
        self._insert(self.file.writing.rest[:count])
        self.send("type")

    def _mistype(self) -> None:
        file = self.file
        wrong = "".join(self._random.choices("etaoinsrhdl_(.", k=self._random.randint(1, 3)))
        file.replace_for_good(file.caret, file.caret, wrong, file.caret + len(wrong))
        self.send("typo")
        for _ in wrong:
            file.replace_for_good(file.caret - 1, file.caret, "", file.caret - 1)
            self.send("typo")

    def _rethink(self) -> None:
        count = 1 + int(self._random.expovariate(1 / 12))
        self.erase(min(self.file.writing.done, count), (1, 1, 4))

    def _accept(self) -> None:
        shown = self._show()
        self._insert(shown)
        self.send("accept")

    def _accept_partly(self) -> None:
        shown = self._show()
        words = re.match(r"\s*\S+(\s+\S+)?", shown)
        self._insert(words.group() if words else shown)
        self.send("partial")

    def _undo(self) -> None:
        for _ in range(self._random.randint(1, 3)):
            if self.file.undo():
                self.send("undo")

    def _show(self) -> str:
        """Show a completion at the caret, to the end of this line or of the next few."""
        file = self.file
        last = self.rounds[-1] if self.rounds else None
        here = (file.name, file.text[: file.caret], file.text[file.caret :])
        if last is None or (last.document, last.prefix, last.suffix) != here:
            self.send("jump")
        rest = file.writing.rest
        lines = rest.splitlines(keepends=True)[: self._random.choice((1, 1, 1, 2, 4))]
        shown = "".join(lines).rstrip("\n") or rest[:1]
        self.rounds[-1] = replace(self.rounds[-1], shown=shown)
        return shown

    def _insert(self, text: str) -> None:
        file = self.file
        file.replace(file.caret, file.caret, text, file.caret + len(text))
        file.writing.done += len(text)


@dataclass(frozen=True, slots=True)
class EditingMix:
    """What the user does how often; weights of actions are relative to each other.

    Attributes:
        habits: how text is written.
        write: continuing the text at the caret.
        look: going elsewhere, half of the time to write something there.
        below: a change below the caret; the caret stays where it is.
        switch: going to another file.
        rewrite: going to the end of a line, deleting some of it backwards, writing it again.
        near: share of moves that stay close.
        block_lines: maximum lines of a missing block.
        opens_lines: a new line is begun at the end of the one before it, so that nothing follows
            the caret in its line; otherwise text is written in front of the line that follows.
    """

    habits: Habits = field(default_factory=Habits)
    write: float = 96.0
    look: float = 1.0
    below: float = 1.0
    switch: float = 1.0
    rewrite: float = 1.0
    near: float = 0.5
    block_lines: int = 8
    opens_lines: bool = False


_TYPING = Habits(typo=0, rethink=0, accept=0, partial=0, undo=0)
_PLAIN = EditingMix(habits=_TYPING, look=0, below=0, switch=0, rewrite=0)


def _typing_with(**weights: float) -> EditingMix:
    """Return plain typing with these habits added."""
    return replace(_PLAIN, habits=replace(_TYPING, **weights))


# The mix, and each kind of action by itself amid plain typing.
SESSION_KINDS: Mapping[str, EditingMix] = {
    "mix": EditingMix(),
    "typing": _PLAIN,
    "typos": _typing_with(typo=17),
    "completions": _typing_with(accept=20, partial=10),
    "rethinking": replace(_typing_with(rethink=12), rewrite=5),
    "jumps": replace(_PLAIN, look=8),
    "edits below": replace(_PLAIN, below=5),
    "undo": _typing_with(undo=7),
    "switching files": replace(_PLAIN, switch=4),
}


def edit_session(
    sources: Mapping[str, str], mix: EditingMix, *, rounds: int, seed: int
) -> list[Round]:
    """Return the requests of one user working on some files.

    Args:
        sources: file name -> the text that the user works towards.
        mix: what the user does how often.
        rounds: how many requests.
        seed: of all random choices.
    """
    generator = random.Random(seed)
    files = [_with_gaps(name, text, mix, generator) for name, text in sources.items()]
    user = _User(Editor(files, mix.habits, generator), mix, generator)
    while len(user.editor.rounds) < rounds:
        user.act()
    return user.editor.rounds[:rounds]


def _with_gaps(name: str, text: str, mix: EditingMix, generator: random.Random) -> OpenFile:
    """Return a file with a block missing at about every thirtieth line, the caret at its end."""
    file = OpenFile(name, "")
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        if lines[number].strip() and generator.random() < 0.03:
            count = generator.randint(1, mix.block_lines)
            block = "".join(lines[number : number + count])
            opens = mix.opens_lines and number > 0
            gap = (len(file.text) - 1, _opened(block)) if opens else (len(file.text), block)
            file.gaps.append(gap)
            number += count
        else:
            file.text += lines[number]
            number += 1
    file.caret = len(file.text)
    return file


def _opened(lines: str) -> str:
    """Return what is typed at the end of a line to write whole lines after it."""
    return "\n" + lines.removesuffix("\n")


class _User:
    """Chooses what to do next in an editor."""

    def __init__(self, editor: Editor, mix: EditingMix, generator: random.Random) -> None:
        self.editor = editor
        self._mix = mix
        self._random = generator
        self._next_gap()
        editor.send("open")

    def act(self) -> None:
        """Do one thing; most things send requests."""
        if not self.editor.file.writing.rest:
            self._next_gap()
        mix = self._mix
        actions = {
            self.editor.write_some: mix.write,
            self._look: mix.look,
            self._change_below: mix.below,
            self._switch: mix.switch,
            self._rewrite: mix.rewrite,
        }
        self._random.choices(list(actions), list(actions.values()))[0]()

    def _next_gap(self) -> None:
        """Move to a missing block, often a near one, or to any line when none is left."""
        file = self.editor.file
        if file.gaps:
            file.gaps.sort(key=lambda gap: abs(gap[0] - file.caret))
            near = self._random.random() < self._mix.near
            where, text = file.gaps.pop(0 if near else self._random.randrange(len(file.gaps)))
            file.writing = Writing(text)
        else:
            ends = re.finditer("\n", file.text)
            opens = self._mix.opens_lines
            where = self._random.choice([0, *(end.start() if opens else end.end() for end in ends)])
            file.writing = self._something()
        self.editor.go(where)

    def _something(self) -> Writing:
        """Return something to write: a copy of a few of the file's own lines."""
        lines = [line for line in self.editor.file.text.splitlines(keepends=True) if line.strip()]
        first = self._random.randrange(len(lines)) if lines else 0
        text = "".join(lines[first : first + self._random.randint(1, 4)]) or "pass\n"
        return Writing(_opened(text) if self._mix.opens_lines else text)

    def _look(self) -> None:
        file = self.editor.file
        here = file.caret
        reach = 2000 if self._random.random() < self._mix.near else len(file.text)
        there = self._random.randint(max(0, here - reach), min(len(file.text), here + reach))
        end = file.text.find("\n", there)
        self.editor.go(end if end >= 0 else len(file.text))
        if self._random.random() < 0.5:
            self.editor.go(here)
        else:
            file.gaps.append((here, file.writing.rest))
            file.writing = self._something()

    def _change_below(self) -> None:
        file = self.editor.file
        names = list(re.finditer(r"\b[a-z_]{3,}\b", file.text[file.caret :]))
        if names:
            start, end = (file.caret + at for at in self._random.choice(names).span())
            new = file.text[start:end] + self._random.choice("s_2")
            file.replace(start, end, new if self._random.random() < 0.7 else "", file.caret)
            self.editor.send("below")

    def _switch(self) -> None:
        others = [file for file in self.editor.files if file is not self.editor.file]
        if others:
            self.editor.file = self._random.choice(others)
            if not self.editor.file.writing.rest:
                self._next_gap()
            self.editor.send("switch")

    def _rewrite(self) -> None:
        file = self.editor.file
        ends = [match.start() for match in re.finditer(r"(?<=\S)\n", file.text)]
        if ends:
            file.gaps.append((file.caret, file.writing.rest))
            end = self._random.choice(ends)
            line = file.text[file.text.rfind("\n", 0, end) + 1 : end].lstrip()
            count = self._random.randint(1, len(line))
            file.writing = Writing(line[-count:], count)
            self.editor.go(end)
            self.editor.erase(count, (1, 4, 8))
