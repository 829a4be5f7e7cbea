"""Needles: facts hidden in real source text, one alone or one among several like it."""

import random
from collections.abc import Mapping

from midfill.lab.bench.methods.haystacks import Haystacks, names
from midfill.lab.bench.methods.probes import Probe, Question, Task, served_probe
from midfill.models.tokens.tokenizer import Tokenizer

_OTHERS: Mapping[Task, int] = {"needle": 0, "multi-key": 3}
"""Needles beside the one that is asked for."""


def needle_probes(
    tokenizer: Tokenizer,
    haystacks: Haystacks,
    *,
    tokens: int,
    depths: tuple[float, ...],
    repeats: int,
    seed: int,
) -> list[Probe]:
    """Return probes with one needle and with several, at each depth.

    Args:
        tokenizer: the model's.
        haystacks: real text.
        tokens: of each context.
        depths: where the needle that is asked for is, from 0 (the beginning) to 1.
        repeats: probes per depth and kind.
        seed: of all random choices.
    """
    probes = []
    for repeat in range(repeats):
        for place, depth in enumerate(depths):
            for task, others in _OTHERS.items():
                rng = random.Random(f"{seed}/{task}/{repeat}/{depth}")
                number = repeat * len(depths) + place
                probes.append(
                    _probe(tokenizer, haystacks, tokens, depth, task, others, number, rng)
                )
    return probes


def _probe(
    tokenizer: Tokenizer,
    haystacks: Haystacks,
    tokens: int,
    depth: float,
    task: Task,
    others: int,
    number: int,
    rng: random.Random,
) -> Probe:
    name, *rest = names(1 + others, rng)
    codes = [f"{code}" for code in rng.sample(range(1000, 10_000), 1 + others)]
    hidden = [(depth, _needle(name, codes[0]))]
    hidden += [(rng.random(), _needle(*pair)) for pair in zip(rest, codes[1:], strict=True)]
    context = haystacks.hide(number, tokens, hidden)
    question = Question(
        tuple(tokenizer.encode_continuation(f"\n# The pass code of the {name} is")),
        tuple(tokenizer.encode_continuation(f" {codes[0]}")),
    )
    return served_probe(f"{task}/{depth:g}/{number}", task, f"{depth:g}", context, question)


def _needle(name: str, code: str) -> str:
    return f"# The pass code of the {name} is {code}.\n"
