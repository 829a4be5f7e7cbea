"""Where to cut the prefix: an online decision about edits that have not happened yet.

A prompt is ``PRE P SUF S MID I``. The prefix before the caret is P + I, cut at k = len(P). The
cache holds the prompts sent before. A new prompt costs the characters after the longest start that
it shares with any of them:

* Text typed or deleted inside I costs only what is new.
* A deletion past k changes P, so all of S is computed again. The same holds when the caret moves,
  since S begins at the caret.
* A change inside S costs the rest of S, and I.
* At the next move, I becomes part of P and has to be computed again: an increment of x characters
  costs x once more.

Cost is not all. A model reads I after the suffix, and answers worse if I is short: the line before
the caret is what it continues, and few models saw a suffix in the middle of it. So a ``CutRule``
names a least increment g for every fresh cut. If the prefix is shorter, all of it stands after the
suffix (k = 0). Beyond g, cost decides.

A fresh cut should be well before the caret for deletions to come, and at the caret for everything
else. Let s = len(S), and let d be how far back the coming deletions reach. A cut is given up when
they leave less than h = g / 2 of the increment. Cutting h + x characters back costs h + x if
d <= x, and otherwise s plus the cost of the next cut. This is ski rental (Karlin et al., 1988) with
x as the rent and s as the price.

The rule (``choose_gap``): the first cut is g characters back, between two lines (``cut_places``
says where exactly). Nearly all real deletions end before they reach h. When one does not, at depth
d, the next gap is h + sqrt(s * d). Up to d, this minimises x + s * P(reach > d + x) under the
scale-free guess P = d / (d + x). From then on the gap is h + s: the rent equals the price. No gap
is less than g.

Bound, for one visit of the caret, beside up to g per cut (no gap exceeds g + x): without a miss the
rule costs s, and so do the best cuts known beforehand. With one miss it costs 2s + sqrt(s * d), and
the best at least s + min(d, s): a ratio of at most 2.2. A second miss lies sqrt(s * d) deeper. The
cost is then 4s + sqrt(s * d), less than 4 times the best. Each further miss costs 2s, and the best
at least s more, since it has to pass the last gap, too. So a visit costs at most 4 times the best,
and g per cut: the best is free to leave no increment at all.

Changes inside S are a second ski rental. While the cut stays, each one costs the increment again. A
new cut reduces that to g but costs the part of S before the change. Every prompt records what its
increment has cost beyond a fresh cut's (``rent``). Once the rent and what the next change would add
exceed the price, the cut moves: at most twice the best cost (the break-even rule), and g per
change.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from midfill.infill.common_affixes import common_prefix
from midfill.infill.cut_places import KeepsTokens, keeps_any_tokens, may_cut, place_cut

_MAX_PROMPTS = 16
_NEAR_MISS = 8  # characters; a deletion this close to giving up the cut will probably go on
_LONG_INCREMENT = 1024  # characters beyond the least increment


@dataclass(frozen=True, slots=True)
class CutRule:
    """What a model needs of its cuts.

    The less of the text before the caret follows the suffix, the worse a model continues it. How
    much it needs is a property of the model.

    Attributes:
        least_increment: characters before the caret that stand after the suffix, at least; the
            whole prefix does if it is shorter. The default is for models that don't say. The
            default model's answers got better up to 200 to 400 characters, and no better after
            that (``midfill eval cuts`` measures it); few models are trained to need less.
    """

    least_increment: int = 400

    @property
    def least_standing(self) -> int:
        """The increment at which a cut is given up that deletions have come close to."""
        return self.least_increment // 2


DEFAULT_RULE = CutRule()
"""For models that don't say what they need."""


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt sent before, as the engine's prefix cache should hold it.

    Attributes:
        head, suffix: texts before and after SUF.
        fragments: the increment as it was typed; head and fragments together were the prefix.
        rent: characters computed again because the suffix changed before the increment, beyond
            those that a fresh cut's increment would have had.
    """

    head: str
    suffix: str
    fragments: tuple[str, ...] = ()
    rent: int = 0

    @classmethod
    def cut_at(cls, cut: int, prefix: str, suffix: str) -> "CachedPrompt":
        """Return a prompt with so many characters of the prefix before SUF, the rest typed once."""
        return cls(prefix[:cut], suffix, extend_fragments((), prefix[cut:]))

    @property
    def increment(self) -> str:
        """Text after MID."""
        return "".join(self.fragments)

    @property
    def prefix(self) -> str:
        """All text before the caret."""
        return self.head + self.increment


@dataclass(frozen=True, slots=True)
class _Match:
    """What a new request shares with a cached prompt, in characters.

    Attributes:
        prompt: the cached one.
        head: common start of its head and the new prefix.
        whole: common start of the two prompts if the new one is cut at the same place; -1 where
            that is impossible, since the head is not a start of the new prefix.
    """

    prompt: CachedPrompt
    head: int
    whole: int

    @property
    def cut(self) -> int:
        """Where the cached prompt is cut."""
        return len(self.prompt.head)


class CutHistory:
    """The cuts of one document; decides the next one from the prompts it remembers.

    Args:
        rule: what the model needs of its cuts.
        keeps_tokens: where its tokenizer allows one.

    Attributes:
        prompts: prompts of the document, oldest first, distinct in (head, suffix).
    """

    def __init__(
        self, rule: CutRule = DEFAULT_RULE, keeps_tokens: KeepsTokens = keeps_any_tokens
    ) -> None:
        self._rule = rule
        self._keeps_tokens = keeps_tokens
        self.prompts: list[CachedPrompt] = []
        self._suffix: str | None = None
        self._arrival = 0  # length of the prefix when the caret came to this suffix
        self._misses = 0  # deletions past the cut since then

    def texts(self) -> Iterator[str]:
        """Yield every text that is held; some are the same object."""
        if self._suffix is not None:
            yield self._suffix
        for prompt in self.prompts:
            yield prompt.head
            yield prompt.suffix
            yield from prompt.fragments

    def restart_visit(self) -> None:
        """Forget where the caret came to its suffix: the text before it begins elsewhere now."""
        self._suffix = None

    def choose_and_record(self, prefix: str, suffix: str) -> CachedPrompt:
        """Cut a new request's prefix, and record the prompt that results.

        While the suffix stays the same, so does the cut, unless deletions have come too close to
        it: text at the caret never costs more than itself. Otherwise the cut with the least total
        is taken: characters to compute now, the increment it leaves (which costs as much again
        later), and the rent paid for it so far. Candidates are the cuts of the recorded prompts
        that leave the least increment, and a fresh one by ``choose_gap``.
        """
        here, length = len(prefix), len(prefix) + len(suffix)
        if suffix != self._suffix:
            self._suffix, self._arrival, self._misses = suffix, here, 0
        matches = [_match(prompt, prefix, suffix) for prompt in self.prompts]
        valid = [match for match in matches if self._serves(match, prefix, suffix)]
        rents: dict[int, int] = {}
        for match in valid:
            rents[match.cut] = max(rents.get(match.cut, 0), match.prompt.rent)

        def total(match: _Match) -> int:
            return length - match.whole + (here - match.cut) + rents[match.cut]

        standing = [match for match in valid if match.prompt.suffix == suffix]
        best = min(reversed(standing or valid), key=total, default=None)
        if standing:
            assert best is not None  # each standing match is a candidate
            return self.record_prompt(prefix, suffix, best.cut, best.prompt, rents[best.cut])
        fresh = self._fresh(prefix, suffix)
        head = max((match.head for match in matches), default=0)
        fresh_total = length - min(head, fresh) + (here - fresh)
        if best is None or fresh_total < total(best):
            self._misses += here < self._arrival
            return self.record_prompt(prefix, suffix, fresh)
        rent = rents[best.cut] + max(0, fresh - best.cut)
        return self.record_prompt(prefix, suffix, best.cut, best.prompt, rent)

    def _serves(self, match: _Match, prefix: str, suffix: str) -> bool:
        """Return whether a prompt may be cut where a cached one is.

        An edit after that place can have made it the inside of a word or of a token.
        """
        if match.whole < 0 or match.cut == 0:
            return match.whole >= 0
        stands = match.prompt.suffix == suffix
        least = self._rule.least_standing if stands else self._rule.least_increment
        far_enough = len(prefix) - match.cut >= least
        return far_enough and may_cut(prefix, match.cut, self._keeps_tokens)

    def _fresh(self, prefix: str, suffix: str) -> int:
        """Return where the next cut goes if it has to move now."""
        depth = max(0, self._arrival - len(prefix))
        misses = self._misses + (depth > 0)
        gap = choose_gap(len(suffix), depth, misses, self._rule)
        return place_cut(prefix, gap, self._keeps_tokens)

    def better_cut(self) -> int | None:
        """Return a better cut for the last prompt's text, worth preparing in idle time.

        A deletion that has come close to the cut is about to cost the whole suffix. A long
        increment will be computed once more when the caret moves.

        Returns:
            Characters of the prefix before the cut; None if the prompt's own cut will do.
        """
        if not self.prompts:
            return None
        last = self.prompts[-1]
        cut, increment = len(last.head), len(last.increment)
        prefix, least = last.prefix, self._rule.least_increment
        better = cut
        if len(prefix) >= self._arrival:
            if increment > least + _LONG_INCREMENT:
                better = place_cut(prefix, least, self._keeps_tokens)
        elif cut and increment < self._rule.least_standing + _NEAR_MISS:
            better = self._fresh(prefix, last.suffix)
        return better if better != cut else None

    def record_prompt(
        self,
        prefix: str,
        suffix: str,
        cut: int,
        source: CachedPrompt | None = None,
        rent: int = 0,
    ) -> CachedPrompt:
        """Record a prompt as one that the cache now holds.

        Args:
            prefix, suffix: texts before and after the caret.
            cut: characters of the prefix before SUF.
            source: the earlier prompt that it continues at the same cut, if there is one.
            rent: paid for that cut so far.

        Returns:
            The prompt.
        """
        head, increment = prefix[:cut], prefix[cut:]
        fragments = extend_fragments(source.fragments if source is not None else (), increment)
        if source is not None:
            head = source.head  # one string for all prompts that share it
        kept = []
        for prompt in self.prompts:
            if prompt.suffix == suffix:
                suffix = prompt.suffix
                if prompt.head == head:
                    continue
            kept.append(prompt)
        self.prompts = kept[1 - _MAX_PROMPTS :]
        self.prompts.append(CachedPrompt(head, suffix, fragments, rent))
        return self.prompts[-1]


def cached_characters(prompts: Iterable[CachedPrompt], prefix: str, suffix: str) -> int:
    """Return how many characters of a text the best of some prompts begins with, wherever cut."""
    matches = (_match(prompt, prefix, suffix) for prompt in prompts)
    return max((max(match.whole, match.head) for match in matches), default=0)


def first_cut(
    prefix: str, rule: CutRule = DEFAULT_RULE, keeps_tokens: KeepsTokens = keeps_any_tokens
) -> int:
    """Return the cut of a document seen for the first time.

    It is 0 where the prefix is too short to leave the rule's least increment: all of it then
    stands after the suffix.
    """
    return place_cut(prefix, rule.least_increment, keeps_tokens)


def choose_gap(suffix: int, depth: int, misses: int, rule: CutRule) -> int:
    """Return how many characters to leave between a fresh cut and the caret; see the module.

    Args:
        suffix: length of the suffix, which is what a deletion past the cut costs.
        depth: how many characters before its arrival the caret has deleted.
        misses: deletions past the cut at this suffix, the present one included.
        rule: what the model needs.
    """
    if misses == 0:
        return rule.least_increment
    room = isqrt(suffix * min(depth, suffix)) if misses == 1 else suffix
    return max(rule.least_increment, rule.least_standing + room)


def extend_fragments(fragments: Sequence[str], increment: str) -> tuple[str, ...]:
    """Split an increment: the old fragments as far as they still match, then what is new."""
    kept, position = [], 0
    for fragment in fragments:
        shared = common_prefix(fragment, increment[position : position + len(fragment)])
        position += shared
        if shared:
            kept.append(fragment[:shared])
        if shared < len(fragment):
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
