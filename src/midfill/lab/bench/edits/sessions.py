"""Editing sessions over real source files, drawn from a documented, seeded mix of actions.

A session starts from files with blocks of lines cut out. The user goes from gap to gap and writes
the missing text again, with what comes in between: looking elsewhere, changes below the caret,
rewriting the end of a line, other files, and the habits of ``Editor``.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from midfill.lab.bench.edits.editor import Editor, Habits, OpenFile, Round, Writing


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
