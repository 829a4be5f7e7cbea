"""Where to cut the prefix: an online decision about edits that have not happened yet.

A prompt is ``PRE P SUF S MID I``; the prefix before the caret is P + I, cut at k = len(P). The
cache holds the prompts sent before, and a new one costs the characters after its longest common
start with any of them:

* Text typed or deleted inside I costs what is new. I is free to change.
* A deletion past k changes P: all of S is computed again. So is it when the caret moves, since
  S begins there.
* A change inside S costs the rest of S, and I.
* At the next move, I stands before the caret as part of P and has to be computed again: an
  increment of x characters will cost x once more.

So a fresh cut wants to be well before the caret for deletions to come, and at the caret for
everything else. Let s = len(S) and d = how far back the coming deletions reach. Cutting x
characters back costs x if d <= x, and s + what the next cut costs otherwise: ski rental (Karlin et
al., 1988), with x the rent and s the price.

The rule (``gap``): the first cut is 32 characters back, at the start of that line; nearly all real
deletions stay behind it. When one does not, at depth d, the next gap is sqrt(s * d): up to d, it
minimises x + s * P(reach > d + x) under the scale-free guess P = d / (d + x). From the next time on
it is s, the rent that equals the price.

Bound, for one visit of the caret: with no miss the rule costs s + 32, and the best cuts known
beforehand at least s. With one it costs 2s + sqrt(s * d), and the best at least s + min(d, s):
2.2 times at most. A second miss lies sqrt(s * d) deeper and makes it 4s + sqrt(s * d), less than 4
times the best. Each further one costs 2s, and the best at least s more, since it has to pass the
last gap, too. So a visit costs at most 4 times the best, plus 32 a cut. Measured over editing
sessions and real histories it is 1.00 to 1.06 times.

Changes inside S are the other ski rental. Each one costs the increment x again while the cut
stays; cutting anew makes x small but costs the part of S before the change. Every prompt keeps
account of what its increment has cost that way (``rent``); once rent and increment together
exceed the price, the cut moves: at most twice the best (the break-even rule).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from midfill.infill.compare import common_prefix

_FIRST_GAP = 32
_LONGEST_LINE = 256  # a line start further back than that is not worth cutting at
_REMEMBERED = 16
_NEAR_CUT = 8  # a deletion this close to the cut will probably pass it
_LONG_INCREMENT = 1024


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt sent before, as the engine's prefix cache should hold it.

    Attributes:
        head, suffix: texts before and after SUF.
        pieces: the increment as it was typed; head and pieces together were the prefix.
        rent: characters of increments computed again because the suffix changed under them.
    """

    head: str
    suffix: str
    pieces: tuple[str, ...] = ()
    rent: int = 0

    @property
    def increment(self) -> str:
        """Text after MID."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class _Match:
    """What a new request shares with a cached prompt, in characters.

    Attributes:
        prompt: the cached one.
        head: shared start of its head and the new prefix.
        whole: shared start of the two prompts if the new one is cut at the same place; -1 where
            that is impossible, since the head is not a start of the new prefix.
    """

    prompt: CachedPrompt
    head: int
    whole: int

    @property
    def cut(self) -> int:
        """Of the cached prompt."""
        return len(self.prompt.head)


class CutHistory:
    """The cuts of one document; decides the next one from the prompts it remembers."""

    def __init__(self) -> None:
        self.prompts: list[CachedPrompt] = []  # oldest first, distinct in (head, suffix)
        self._suffix: str | None = None
        self._arrival = 0  # length of the prefix when the caret came to this suffix
        self._misses = 0  # deletions past the cut since then

    def choose(self, prefix: str, suffix: str) -> CachedPrompt:
        """Cut a new request's prefix; the prompt it makes is remembered.

        While the suffix stands, so does the cut: text at the caret never costs more than itself.
        Otherwise this picks the least of: characters to compute now, the increment it leaves
        (which costs as much again later), and the rent paid for it. Candidates are the cuts of
        the remembered prompts, and a fresh one by ``gap``.
        """
        here, length = len(prefix), len(prefix) + len(suffix)
        if suffix != self._suffix:
            self._suffix, self._arrival, self._misses = suffix, here, 0
        matches = [_match(prompt, prefix, suffix) for prompt in self.prompts]
        valid = [match for match in matches if match.whole >= 0]
        rents: dict[int, int] = {}
        for match in valid:
            rents[match.cut] = max(rents.get(match.cut, 0), match.prompt.rent)

        def total(match: _Match) -> int:
            return length - match.whole + (here - match.cut) + rents[match.cut]

        standing = [match for match in valid if match.prompt.suffix == suffix]
        best = min(reversed(standing or valid), key=total, default=None)
        if not standing:
            cut = self._fresh(prefix, suffix)
            head = max((match.head for match in matches), default=0)
            fresh_total = length - min(head, cut) + (here - cut)
            if best is None or fresh_total < total(best):
                self._misses += here < self._arrival
                return self.remember(prefix, suffix, cut)
        assert best is not None  # a standing match is one
        return self.remember(prefix, suffix, best.cut, best.prompt, rents[best.cut])

    def _fresh(self, prefix: str, suffix: str) -> int:
        """Where the next cut goes if it has to move now."""
        depth = max(0, self._arrival - len(prefix))
        misses = self._misses + (depth > 0)
        if misses == 0:
            return first_cut(prefix)
        return place(prefix, gap(len(suffix), depth, misses))

    def expect(self) -> int | None:
        """A better cut for the last prompt's text, worth preparing while there is nothing to do.

        None if its own cut will do. A deletion that has nearly come to the cut is about to cost
        the whole suffix; a long increment will have to be computed once more when the caret
        moves, and strains the model meanwhile.
        """
        if not self.prompts:
            return None
        last = self.prompts[-1]
        cut, increment = len(last.head), len(last.increment)
        prefix = last.head + last.increment
        if len(prefix) < self._arrival:
            better = self._fresh(prefix, last.suffix) if increment < _NEAR_CUT else cut
        else:
            better = place(prefix, _FIRST_GAP) if increment > _LONG_INCREMENT else cut
        return better if better != cut else None

    def remember(
        self,
        prefix: str,
        suffix: str,
        cut: int,
        source: CachedPrompt | None = None,
        rent: int = 0,
    ) -> CachedPrompt:
        """Take note of a prompt, as one that the cache now holds.

        Args:
            source: the earlier prompt it goes on from at the same cut, if there is one.
            rent: paid for that cut so far.
        """
        head, increment = prefix[:cut], prefix[cut:]
        pieces = go_on(source.pieces if source is not None else (), increment)
        if source is not None:
            head = source.head  # one string for all prompts that share it
            rent += 0 if source.suffix == suffix else len(increment)
        kept = []
        for prompt in self.prompts:
            if prompt.suffix == suffix:
                suffix = prompt.suffix
                if prompt.head == head:
                    continue
            kept.append(prompt)
        self.prompts = kept[1 - _REMEMBERED :]
        self.prompts.append(CachedPrompt(head, suffix, pieces, rent))
        return self.prompts[-1]


def first_cut(prefix: str) -> int:
    """The cut of a document seen for the first time."""
    # An empty head is SPM, which not every model knows well.
    return place(prefix, _FIRST_GAP) or len(prefix)


def gap(suffix: int, depth: int, misses: int) -> int:
    """Characters to leave between a fresh cut and the caret; see the module's text.

    Args:
        suffix: length of the suffix, what a deletion past the cut costs.
        depth: how far behind its arrival the caret has deleted.
        misses: deletions past the cut at this suffix, the present one included.
    """
    if misses == 0:
        return _FIRST_GAP
    if misses == 1:
        return max(_FIRST_GAP, isqrt(suffix * min(depth, suffix)))
    return max(_FIRST_GAP, suffix)


def place(prefix: str, gap: int) -> int:
    """The cut at least ``gap`` characters before the end: at a line's start if one is near.

    Never between a carriage return and its line feed.
    """
    cut = max(0, len(prefix) - gap)
    line = prefix.rfind("\n", 0, cut) + 1
    if cut - line <= _LONGEST_LINE:
        return line
    if prefix[cut - 1 : cut + 1] == "\r\n":
        cut -= 1
    return cut


def go_on(pieces: Sequence[str], increment: str) -> tuple[str, ...]:
    """An increment in pieces: the old ones as far as they still stand, then what is new."""
    kept, position = [], 0
    for piece in pieces:
        shared = common_prefix(piece, increment[position : position + len(piece)])
        position += shared
        if shared:
            kept.append(piece[:shared])
        if shared < len(piece):
            break
    if position < len(increment):
        kept.append(increment[position:])
    return tuple(kept)


def _match(prompt: CachedPrompt, prefix: str, suffix: str) -> _Match:
    cut = len(prompt.head)
    if not prefix.startswith(prompt.head):
        return _Match(prompt, common_prefix(prompt.head, prefix), -1)
    if prompt.suffix == suffix:
        increment = prompt.increment
        typed = common_prefix(increment, prefix[cut : cut + len(increment)])
        return _Match(prompt, cut, cut + len(suffix) + typed)
    return _Match(prompt, cut, cut + common_prefix(prompt.suffix, suffix))


def size(prompts: Sequence[CachedPrompt]) -> int:
    """Characters the prompts hold, texts they share counted once."""
    texts = {id(text): len(text) for one in prompts for text in (one.head, one.suffix)}
    return sum(texts.values()) + sum(len(piece) for one in prompts for piece in one.pieces)
