"""Mutation: new inputs from seeds, the same for the same number, without any library."""

import random
from collections.abc import Sequence

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)


def mutated(seeds: Sequence[bytes], words: Sequence[bytes], max_bytes: int, number: int) -> bytes:
    """Return the input of a number: a seed with a few changes."""
    rng = random.Random(number)
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        _change(data, seeds, words, rng)
    return bytes(data[:max_bytes])


def _change(
    data: bytearray, seeds: Sequence[bytes], words: Sequence[bytes], rng: random.Random
) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64)))
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.choice(_INTERESTING)
        case 2:
            del data[at:end]
        case 3:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        case 4:
            data[at:at] = data[at:end]
        case 5 if words:
            word = rng.choice(words)
            data[at : at + rng.choice((0, len(word)))] = word
        case 6:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at:end] = other[start : start + rng.choice((1, 4, 16, 64))]
        case _:
            number = rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1, len(data)))
            width = rng.choice((4, 8))
            data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
