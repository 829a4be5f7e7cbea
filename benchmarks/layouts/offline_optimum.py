"""The offline optimum: the cheapest sequence of cuts, with the whole session known in advance.

Every prompt takes its cached tokens from one earlier prompt, its *parent*. For fixed parents the
prompts form a tree, and the cheapest cut of every prompt follows exactly by dynamic programming
from the leaves to the root, over every character position at once. Parents and cuts are then
improved in turn: given the cuts, each prompt's best parent is looked up; given the parents, the
cuts are computed anew. Started from the cuts of another strategy, the result never costs more than
that strategy (in this module's count of tokens, which can be off by one where segments meet).
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.layouts.cost import PieceTokenizer
from midfill.infill.common_affixes import common_prefix
from midfill_lab.bench.editing import Round

Counts = npt.NDArray[np.int64]
Pieces = Callable[[str], Sequence[str]]


def offline_cuts(
    rounds: Sequence[Round],
    starts: Sequence[Sequence[int]] = (),
    pieces: Pieces = PieceTokenizer.pieces,
) -> list[int]:
    """Return where to cut each prompt of ONE document's session.

    Args:
        rounds: the requests, in order.
        starts: cuts of other strategies, as further starting points.
        pieces: splits a text into the texts of its tokens.
    """
    states = [_State.of(edit, pieces) for edit in rounds]
    best: list[int] = []
    best_cost: int | None = None
    chain = [max(0, number - 1) for number in range(len(states))]
    simple = [[len(edit.prefix) for edit in rounds], [0] * len(rounds)]
    for parents in [chain, *(_best_parents(rounds, cuts) for cuts in [*starts, *simple])]:
        improving = True
        while improving:
            cost, cuts = _best_cuts(states, parents)
            improving = best_cost is None or cost < best_cost
            if improving:
                best_cost, best = cost, cuts
                parents = _best_parents(rounds, cuts)
    return best


@dataclass(frozen=True, slots=True)
class _State:
    """A request and the number of its tokens before each character position.

    Attributes:
        round: the request.
        whole: int64 [len(prefix) + 1]: tokens that end at or before each position.
        split: int64 [len(prefix) + 1]: 1 where a cut would split a token in two, else 0.
        suffix: int64 [len(suffix) + 1]: as ``whole``, of the suffix.
        length: tokens of the prompt, wherever it is cut (``split`` is added to it).
    """

    round: Round
    whole: Counts
    split: Counts
    suffix: Counts
    length: int

    @classmethod
    def of(cls, edit: Round, pieces: Pieces) -> "_State":
        whole, split = _tokens_before(edit.prefix, pieces)
        suffix, _ = _tokens_before(edit.suffix, pieces)
        return cls(edit, whole, split, suffix, 3 + int(whole[-1] + suffix[-1]))


@dataclass(frozen=True, slots=True)
class _Link:
    """The costs of a prompt (the child) after its parent.

    Attributes:
        same: int64 [head + 1]: tokens computed when both are cut at k; head is what the two
            prefixes share.
        whole: int64 [len(child prefix) + 1]: the child's tokens before each position.
        length: int64 [len(child prefix) + 1]: its tokens by cut, the last one left out, when
            nothing is shared.
    """

    same: Counts
    whole: Counts
    length: Counts

    @classmethod
    def between(cls, parent: _State, child: _State) -> "_Link":
        cached = parent.round.prefix + parent.round.shown
        shared = common_prefix(cached, child.round.prefix)
        head = min(shared, len(parent.round.prefix))
        below = common_prefix(parent.round.suffix, child.round.suffix)
        whole, length = child.whole, child.length + child.split
        split = child.split[: head + 1]
        if below == len(child.round.suffix) == len(parent.round.suffix):
            reused = split + 3 + child.suffix[-1] + whole[shared]
        else:
            reused = split + 2 + whole[: head + 1] + child.suffix[below]
        return cls(np.maximum(1, length[: head + 1] - reused), whole, length - 1)

    @property
    def head(self) -> int:
        return len(self.same) - 1

    def best_child_cut(self, parent_cut: int, after: Counts) -> tuple[int, int]:
        """Return the child's cheapest cut for one cut of the parent, and the cost from there on."""
        reach = min(parent_cut, self.head)
        costs = after + self.length - self.whole[reach]
        costs[:reach] += self.whole[reach] - self.whole[:reach]
        if parent_cut <= self.head:
            costs[parent_cut] = after[parent_cut] + self.same[parent_cut]
        cut = int(costs.argmin())
        return cut, int(costs[cut])

    def best_costs(self, parent_length: int, after: Counts) -> Counts:
        """Return ``best_child_cut``'s cost by cut of the parent, int64 [parent_length + 1]."""
        alone = after + self.length
        shorter = np.minimum.accumulate(alone - self.whole)  # child cut at or before k
        longer = np.minimum.accumulate(alone[::-1])[::-1]  # child cut at or after k
        reach = np.minimum(np.arange(parent_length + 1), self.head)
        costs = np.minimum(shorter[reach], longer[reach] - self.whole[reach])
        both = slice(0, self.head + 1)
        costs[both] = np.minimum(costs[both], after[both] + self.same)
        return costs


def _best_cuts(states: Sequence[_State], parents: Sequence[int]) -> tuple[int, list[int]]:
    """Return the cheapest cuts for given parents, with their cost; parents[0] is not used."""
    after = [np.zeros(len(state.round.prefix) + 1, np.int64) for state in states]
    links: list[_Link | None] = [None] * len(states)
    for number in range(len(states) - 1, 0, -1):
        parent = parents[number]
        link = _Link.between(states[parent], states[number])
        links[number] = link
        after[parent] += link.best_costs(len(states[parent].round.prefix), after[number])
    root = after[0] + states[0].split
    cuts = [int(root.argmin())]
    for number, found in enumerate(links):
        if found is not None:
            cuts.append(found.best_child_cut(cuts[parents[number]], after[number])[0])
    return states[0].length + int(root[cuts[0]]), cuts


def _best_parents(rounds: Sequence[Round], cuts: Sequence[int]) -> list[int]:
    """Return the earlier prompt that shares most with each prompt: a neighbour in sorted order."""
    seen: list[tuple[str, int]] = []
    parents = []
    for number, (edit, cut) in enumerate(zip(rounds, cuts, strict=True)):
        before = f"{edit.prefix[:cut]}\udc00{edit.suffix}\udc01"
        prompt = before + edit.prefix[cut:]
        where = bisect.bisect_left(seen, (prompt, -1))
        near = seen[max(0, where - 1) : where + 1]
        parents.append(max(near, key=lambda at: common_prefix(at[0], prompt), default=("", 0))[1])
        bisect.insort(seen, (prompt + edit.shown, number))
    return parents


def _tokens_before(text: str, pieces: Pieces) -> tuple[Counts, Counts]:
    """Return the whole tokens before each position, and 1 where a position is inside a token."""
    lengths = np.array([len(piece) for piece in pieces(text)], np.int64)
    ends = np.zeros(len(text) + 1, np.int64)
    ends[np.cumsum(lengths)] = 1
    split = 1 - ends
    split[0] = 0
    return np.cumsum(ends), split
