"""Candidates: which other answers to try beside the first one, and which of them to keep.

The most likely token at each place need not lead to the most likely line. What is wrong is decided
mostly by the first tokens: one of them was chosen although another was nearly as probable. So
answers branch off there. A branch has another token at one of the first ``PLACES`` places that
nothing prescribes, and goes on as the first answer does. It is worth trying once the first answer
has become less probable than the branch's beginning: no sooner, since until then it may well stay
ahead, and from then on for certain, since a line only gets less probable with each token. Most
answers that the model is sure of have no branch at all.

The most probable line that is complete is kept. Nothing here is random, and what is tried depends
on the first answer's tokens alone, not on which answer is how far at what time.

Later places are left out: there a search finds lines that end early, which are more probable and
less often right. ``docs/evaluation.md`` has the figures, and those of what else was tried.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

PLACES = 3
"""First tokens at which answers branch off."""

MAX_CANDIDATES = 8
"""Answers that may be tried for one prompt."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The beginning of a branch.

    Attributes:
        place: number of the first answer's tokens that it begins with.
        token_id: the token after them.
        logprob: of that token.
        joint: of the whole beginning.
    """

    place: int
    token_id: int
    logprob: float
    joint: float


@dataclass(slots=True)
class Alternatives:
    """The alternatives to one answer, while it is generated.

    Args:
        count: maximum number of branches.
    """

    count: int
    _known: list[Alternative] = field(default_factory=list)
    _places: int = 0
    _joint: float = 0.0

    def push(self, logprob: float, others: Iterable[tuple[int, float]] | None) -> None:
        """Take the first answer's next token, up to the end of its first line.

        Args:
            logprob: the token's, given what the answer has to begin with.
            others: (token id, log probability) of the most likely others at its place; None where
                something is prescribed.
        """
        if others is not None and self._places < PLACES:
            self._known += (
                Alternative(self._places, token_id, other, self._joint + other)
                for token_id, other in others
            )
        self._places += 1
        self._joint += logprob

    def take(self) -> Iterator[Alternative]:
        """Yield the alternatives that have become worth trying, the most probable first."""
        self._known.sort(key=lambda each: each.joint, reverse=True)
        while self.count and self._known and self._known[0].joint > self._joint:
            self.count -= 1
            yield self._known.pop(0)


@dataclass(frozen=True, slots=True)
class Line:
    """How far the first line of a candidate is.

    Attributes:
        joint: log probability of its tokens so far, given what the answer has to begin with.
        complete: whether it has ended, and not because the answer reached its maximum length.
        over: whether nothing more will come of it.
        blank: whether it has no text so far.
    """

    joint: float
    complete: bool
    over: bool
    blank: bool

    @property
    def is_usable(self) -> bool:
        """Whether it may be kept."""
        return self.complete and not self.blank


def behind(lines: list[Line]) -> list[int]:
    """Return the numbers of the lines that can't be kept any more: a complete one is ahead."""
    best = max((line.joint for line in lines if line.is_usable), default=None)
    if best is None:
        return []
    return [number for number, line in enumerate(lines) if line.joint < best]


def choose(lines: list[Line]) -> int | None:
    """Return the number of the line to keep; None as long as another may turn out better.

    The first answer's comes first: it is kept if no line is usable, and of equal ones.
    """
    lost = behind(lines)
    if not all(line.complete or line.over or place in lost for place, line in enumerate(lines)):
        return None
    usable = [number for number, line in enumerate(lines) if line.is_usable]
    return max(usable, key=lambda number: lines[number].joint, default=0)
