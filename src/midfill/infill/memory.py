"""Memory: what is remembered from request to request, and how much it may be."""

from typing import NamedTuple


class Memory(NamedTuple):
    """The memory of one kind of things.

    Attributes:
        held_bytes: what they take now, objects included.
        max_bytes: what they may take.
    """

    held_bytes: int
    max_bytes: int
