"""A small engine over the toy runner, with prompts, parameters and true answers for it."""

import random

from toy_runner import VOCAB, ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from serving import build_engine, greedy_alone


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    return random.Random(seed).choices(range(VOCAB), k=length)


def sampling(**fields: object) -> EngineSamplingParams:
    """Return parameters for a greedy answer of twelve tokens, changed by ``fields``."""
    return EngineSamplingParams(
        **({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | fields)
    )


def engine(slots: int = 512, eos: tuple[int, ...] = (), **options: int) -> Engine:
    """Build an engine without speculation; ``options`` as in ``build_engine``."""
    return build_engine(ToyRunner(slots), eos, **options)


def truth(tokens: list[int], count: int = 12) -> list[int]:
    """Return the greedy answer to ``tokens``, computed without an engine."""
    return greedy_alone(ToyRunner(256), tokens, count)
