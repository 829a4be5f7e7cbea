"""Needles in a haystack: source code with a sentence in it that a question at the end asks for.

The texts of calibrations. The haystack is source code of Python's standard library.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from midfill.arrays import Int32Array
from midfill.models.tokens.tokenizer import Tokenizer

_MODULES = ("argparse", "configparser", "csv", "difflib", "heapq", "shlex", "tarfile", "zipfile")
_NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "hazel")
_WORDS = (
    "apple", "river", "stone", "cloud", "tiger", "paper", "green", "seven", "winter", "music",
    "bridge", "silver", "window", "forest", "yellow", "garden", "ocean", "candle", "mirror",
    "rocket", "pencil", "island", "button", "ladder",
)  # fmt: skip
_DEPTHS = 5
_LENGTHS = 3


@dataclass(frozen=True)
class NeedleText:
    """A text that ends with the beginning of what its needle says.

    Attributes:
        token_ids: [n] int32.
        needle: numbers of the needle's first token, and of the first one after it.
        answer: [m] int32, how the text goes on.
    """

    token_ids: Int32Array
    needle: tuple[int, int]
    answer: Int32Array


def needle_text(
    tokenizer: Tokenizer, tokens: int, words: int, number: int, seed: int
) -> NeedleText:
    """Return one of a series of texts of several lengths, with needles at several depths.

    Args:
        tokenizer: of the model.
        tokens: about how long the longest are; others are a half and a quarter as long.
        words: random words that the needle tells.
        number: which text.
        seed: of its random choices.
    """
    rng = np.random.default_rng([seed, number])
    name, told = rng.choice(_NAMES), " ".join(rng.choice(_WORDS, words))
    needle = tokenizer.encode(f"\n# The {name} passkey is {told}.\n")
    question = tokenizer.encode(f"\n# What is the {name} passkey?\n# The {name} passkey is")
    answer = tokenizer.encode(f" {told}.")
    room = max(2, tokens // 2 ** (number % _LENGTHS) - len(needle) - len(question) - len(answer))
    source = _source(int(rng.integers(len(_MODULES))))
    start = int(rng.integers(max(1, len(source) - 8 * room)))
    hay = tokenizer.encode(source[start : start + 8 * room])[:room]
    depth = (number // _LENGTHS % _DEPTHS + 0.5) / _DEPTHS
    place = int(depth * len(hay))
    ids = [*hay[:place], *needle, *hay[place:], *question]
    return NeedleText(
        np.array(ids, np.int32), (place, place + len(needle)), np.array(answer, np.int32)
    )


@cache
def _source(module: int) -> str:
    """Return the source of one of the modules."""
    spec = importlib.util.find_spec(_MODULES[module])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
