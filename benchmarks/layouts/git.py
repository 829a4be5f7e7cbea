"""Editing sessions from a real history: the commits of a local git repository, typed.

For each text file that a commit changed, the old text becomes the new one by small edits from top
to bottom: go there, delete what is gone (backwards key by key where it is short, as a selection
where it is long), write what is new by the habits of ``Editor``.
"""

import difflib
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from midfill.errors import MidfillError
from midfill_lab.bench.editing import Editor, Habits, OpenFile, Round, Writing

_MAX_CHARACTERS = 200_000
_SELECTED = 40  # longer deletions are a selection and one key


class HistoryError(MidfillError):
    """A path that is no git repository, or one without usable history."""


@dataclass(frozen=True, slots=True)
class History:
    """A repository up to one commit, so that what is replayed doesn't change.

    Attributes:
        repository: a work tree or a bare repository.
        commit: the hash of its newest commit that is replayed.
    """

    repository: Path
    commit: str

    @classmethod
    def find(cls, named: str) -> "History":
        """Return the history that "PATH" or "PATH@COMMIT" names; without a commit, up to HEAD.

        Raises:
            HistoryError: there is no such repository, or no such commit in it.
        """
        path, commit = Path(named), "HEAD"
        if "@" in named and not path.exists():
            before, _, commit = named.rpartition("@")
            path = Path(before)
        found = _git(path, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
        # Not resolved: the name is the one the user knows it by.
        return cls(path.absolute(), found.decode().split()[-1])

    def __str__(self) -> str:
        return f"{self.repository.name}@{self.commit[:10]}"


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file before and after a commit."""

    path: str
    before: str
    after: str


def git_session(
    history: History, *, rounds: int, seed: int = 0, habits: Habits | None = None
) -> list[Round]:
    """Return the newest part of a history as requests, oldest first.

    Args:
        history: the repository and its newest commit.
        rounds: maximum requests; whole commits, newest first, are added until there are enough,
            then the oldest requests are left out.
        seed, habits: how the new text is written.

    Raises:
        HistoryError: git can't read it, or no commit changes a text file.
    """
    habits = habits or Habits()
    commits: list[list[Round]] = []
    count = 0
    for number, changes in enumerate(_changes(history)):
        typed = _typed(changes, habits, random.Random(f"{seed}/{number}"))
        commits.append(typed)
        count += len(typed)
        if count >= rounds:
            break
    if count == 0:
        raise HistoryError(f"no commit in {history.repository} changes a text file")
    return [edit for commit in reversed(commits) for edit in commit][-rounds:]


def _changes(history: History) -> Iterator[list[FileChange]]:
    """Yield the changed text files of each commit, newest first, without merges."""
    repository = history.repository
    for commit in _git(repository, "rev-list", "--no-merges", history.commit).decode().split():
        listing = _git(
            repository, "diff-tree", "-r", "-z", "--root", "--no-commit-id", "--no-renames",
            "--diff-filter=M", commit,
        )  # fmt: skip
        fields = listing.decode("utf-8", "replace").split("\0")
        changes = []
        for head, path in zip(fields[0::2], fields[1::2], strict=False):
            _, _, old, new, _ = head.split()
            before, after = _text(repository, old), _text(repository, new)
            if before is not None and after is not None:
                changes.append(FileChange(path, before, after))
        if changes:
            yield changes


def _text(repository: Path, blob: str) -> str | None:
    """Return a blob as text, or None if it is binary or too long to be written by hand."""
    try:
        text = _git(repository, "cat-file", "blob", blob).decode()
    except (HistoryError, UnicodeDecodeError):
        return None
    return text if "\0" not in text and len(text) <= _MAX_CHARACTERS else None


def _git(repository: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise HistoryError("git is not installed") from None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", "replace").strip().splitlines()
        raise HistoryError(
            f"git can't read {repository}: {reason[-1] if reason else error}"
        ) from None


def _typed(changes: list[FileChange], habits: Habits, generator: random.Random) -> list[Round]:
    """Return the requests of one commit."""
    files = [OpenFile(change.path, change.before) for change in changes]
    editor = Editor(files, habits, generator)
    for file, change in zip(files, changes, strict=True):
        editor.file = file
        shift = 0
        for start, end, new in _edits(change.before, change.after):
            _apply(editor, start + shift, end + shift, new, generator)
            shift += len(new) - (end - start)
        if file.text != change.after:  # the simulation must end where the commit did
            raise AssertionError(f"{change.path} was not typed as committed")
    return editor.rounds


def _apply(editor: Editor, start: int, end: int, new: str, generator: random.Random) -> None:
    """Type one edit: text[start:end] becomes ``new``."""
    file = editor.file
    file.writing = Writing(file.text[start:end], end - start)
    editor.go(end)
    if end - start > _SELECTED:
        editor.erase(end - start, (end - start,))
    else:
        editor.erase(end - start, (1, 4, 8))
    file.writing = Writing(new)
    file.forget_changes()
    while file.writing.rest:
        editor.write_some()


def _edits(before: str, after: str) -> Iterator[tuple[int, int, str]]:
    """Yield edits as (start, end, new text) in ``before``'s positions: lines, then their words."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    position = _starts(old)
    lines = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i1, i2, j1, j2 in lines.get_opcodes():
        if kind == "replace":
            yield from _word_edits("".join(old[i1:i2]), "".join(new[j1:j2]), position[i1])
        elif kind != "equal":
            yield position[i1], position[i2], "".join(new[j1:j2])


def _word_edits(before: str, after: str, offset: int) -> Iterator[tuple[int, int, str]]:
    old, new = re.findall(r"\w+|\s+|.", before), re.findall(r"\w+|\s+|.", after)
    position = _starts(old)
    words = difflib.SequenceMatcher(None, old, new, autojunk=False)
    if words.ratio() < 0.5:  # so little in common that nobody would keep it
        yield offset, offset + len(before), after
        return
    for kind, i1, i2, j1, j2 in words.get_opcodes():
        if kind != "equal":
            yield offset + position[i1], offset + position[i2], "".join(new[j1:j2])


def _starts(pieces: list[str]) -> list[int]:
    """Return where each piece begins, and where the last one ends."""
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return starts
