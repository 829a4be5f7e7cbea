"""The offline optimum is as good as can be found."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import product

from editing import session

from benchmarks.layouts import prompts
from benchmarks.layouts.cost import PromptEncoder
from benchmarks.layouts.offline_optimum import offline_cuts
from midfill_lab.bench.editing import Round
from midfill_lab.bench.edits import efim_cuts


def test_it_is_as_good_as_trying_every_cut() -> None:
    """Each character a token, so that its count is exact. Parents and cuts are improved in turn,
    which can miss the very best: here it does in 1 of 100 sessions, by a token."""
    chance = random.Random(1)
    encode = PromptEncoder(lambda text: [ord(char) for char in text])
    misses = []
    for _ in range(300):
        texts = [
            ("".join(chance.choices("ab", k=before)), "".join(chance.choices("ab", k=after)))
            for before, after in zip(
                chance.choices(range(5), k=4), chance.choices(range(4), k=4), strict=True
            )
        ]
        rounds = [Round("a", prefix, suffix, "type") for prefix, suffix in texts]
        cost = partial(_cost, rounds, encode)
        every = min(map(cost, product(*(range(len(one.prefix) + 1) for one in rounds))))
        misses.append(cost(offline_cuts(rounds, pieces=list)) - every)
    assert min(misses) == 0
    assert max(misses) <= 1
    assert sum(misses) <= 3


def test_it_is_never_dearer_than_what_it_starts_from() -> None:
    encode = PromptEncoder(lambda text: [ord(char) for char in text])
    for seed in range(4):
        rounds = [one for one in session("mix", seed=seed) if one.document == "a.py"]
        chance = random.Random(seed)
        start = [chance.randrange(len(one.prefix) + 1) for one in rounds]
        efim = efim_cuts(rounds)
        best = offline_cuts(rounds, [start, efim], pieces=list)
        costs = [_cost(rounds, encode, cuts) for cuts in (best, start, efim)]
        assert costs[0] <= min(costs[1:])


def _cost(rounds: list[Round], encode: PromptEncoder, cuts: Sequence[int]) -> int:
    return sum(prompts.count(rounds, prompts.cut_prompts(rounds, cuts), encode))
