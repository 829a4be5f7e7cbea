"""Plugin: turns what happens in an editor into the requests that a plugin sends."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

from midfill.lab.bench.edits.editor import Round

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a plugin.

    Attributes:
        path: where it is sent.
        body: its JSON.
        answer: what the model writes.
        copies: how many equal requests are sent at once.
    """

    path: str
    body: Mapping[str, object]
    answer: str = ""
    copies: int = 1


Asking = Generator[Sent, str, None]
"""Yields requests, and gets the body of each response."""


class Plugin(Protocol):
    """A plugin in one session of its user; it may remember what it has seen."""

    def ask(self, one: Round, answer: str) -> Asking:
        """Send what the plugin sends where the editor is in this state.

        Args:
            one: the state, and what the user has just done.
            answer: what the model writes at the caret.
        """
        ...


class OtherFiles:
    """The files that were seen before, as they were then, the newest first."""

    def __init__(self) -> None:
        self._last: dict[str, Round] = {}

    def besides(self, one: Round) -> list[Round]:
        """Record a state; return the last states of all other files."""
        self._last.pop(one.document, None)
        others = list(reversed(self._last.values()))
        self._last[one.document] = one
        return others


def last_lines(prefix: str, count: int) -> str:
    """Return the caret's line up to the caret, and as many whole lines before it."""
    return "\n".join(prefix.split("\n")[-count - 1 :])


def first_lines(suffix: str, count: int) -> str:
    """Return the rest of the caret's line, and as many whole lines after it."""
    lines = suffix.split("\n")
    return "\n".join(lines[: count + 1]) + ("\n" if count + 1 < len(lines) else "")
