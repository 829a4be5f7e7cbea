"""Succession: a method of eviction, and one that keeps what stays at fewer bits.

Both decide at the end of the prompt, one after the other: the second is shown what the first has
left. From then on only the second decides, on the tokens of the answer. That needs two methods that
don't get in each other's way: one that only drops keys, once, since what is quantised is never
dropped or moved afterwards; and one that quantises any keys, whatever attends to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from midfill.errors import InvalidRequestError
from midfill.methods.evict.method import CompressionMethod


@runtime_checkable
class DroppingMethod(CompressionMethod, Protocol):
    """A method that says whether another may decide on what it keeps."""

    @property
    def only_drops(self) -> bool:
        """Whether keys that stay are as they were: none is moved, merged, or counts otherwise."""


@runtime_checkable
class QuantizingMethod(CompressionMethod, Protocol):
    """A method that keeps all keys, and most of them at fewer bits."""

    @property
    def follows_eviction(self) -> bool:
        """Whether heads may hold different keys: it looks at no attention, and at no tokens."""


@dataclass(frozen=True)
class Succession:
    """Two methods, of which the second decides on what the first has kept."""

    first: CompressionMethod
    second: CompressionMethod


Named = tuple[str, object]
"""A method with the name that requests give it."""


def in_succession(methods: Sequence[Named]) -> list[Named]:
    """Return a request's methods, an eviction with what quantises after it as one.

    Args:
        methods: with their names, in any order.

    Raises:
        InvalidRequestError: keys are to be dropped and quantised by methods that can't do that
            together; says which, and why.
    """
    quantizing = [each for each in methods if isinstance(each[1], QuantizingMethod)]
    evicting = [
        each
        for each in methods
        if isinstance(each[1], CompressionMethod) and each not in quantizing
    ]
    if len(quantizing) != 1 or len(evicting) != 1:
        return list(methods)
    pair = evicting[0], quantizing[0]
    (first_name, first), (second_name, second) = pair
    assert isinstance(first, CompressionMethod)
    assert isinstance(second, QuantizingMethod)
    for condition, reason in (
        (first.interval, f"{first_name} drops keys while the answer is written, too"),
        (not _only_drops(first), f"{first_name} does more to keys than dropping them"),
        (not second.follows_eviction, f"{second_name} needs all tokens in all heads"),
    ):
        if condition:
            raise InvalidRequestError(
                f"{first_name} and {second_name} can't stand together: {reason}", param="method"
            )
    joined = f"{first_name}+{second_name}", Succession(first, second)
    return [*(each for each in methods if each not in pair), joined]


def _only_drops(method: CompressionMethod) -> bool:
    return isinstance(method, DroppingMethod) and method.only_drops
