"""RandomStream: the random numbers that one answer is sampled with."""

import secrets

import numpy as np


class RandomStream:
    """Numbers that depend on a seed, the answer's index and how many were drawn before, alone.

    Args:
        seed: of the request; None takes one that nobody can know.
        index: of the answer.
    """

    __slots__ = ("_generator", "_index", "_seed")

    def __init__(self, seed: int | None, index: int = 0) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self._index = index
        self._generator: np.random.Generator | None = None

    def of_answer(self, index: int) -> "RandomStream":
        """Return the stream of another answer to the same request, from its beginning."""
        return RandomStream(self._seed, index)

    def draw(self) -> float:
        """Draw the next number in [0, 1)."""
        if self._generator is None:
            key = np.array([self._seed % 2**64, self._index], dtype=np.uint64)
            self._generator = np.random.Generator(np.random.Philox(key=key))
        return self._generator.random()
