"""DeficitRoundRobin: whose queued request is next, where several tenants wait.

Source: Shreedhar and Varghese, "Efficient Fair Queueing Using Deficit Round Robin", SIGCOMM 1995:
tenants with queued requests take turns, each turn adds a quantum of tokens to the tenant's deficit,
and its requests are admitted as long as that lasts.

What differs: nobody knows what an answer will cost when it is admitted. So tokens are paid once
they are computed, and a deficit may become negative, which later turns make up for. This is the
form that Adiseshu, Parulkar and Varghese call surplus round robin (SIGCOMM 1996).
"""

from dataclasses import dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """A tenant with queued requests, and the tokens that it may still have computed."""

    tenant: str
    deficit: int


Turns = tuple[Turn, ...]
"""Tenants in the order of their turns; the first one's turn it is."""


@dataclass(frozen=True)
class DeficitRoundRobin:
    """Fair on tokens: of two tenants that always have requests queued, neither gets more than the
    other, but for a quantum and one request.

    Attributes:
        quantum: tokens per turn.
    """

    quantum: int = 256

    def __post_init__(self) -> None:
        if self.quantum < 1:
            raise ValueError("a quantum is at least 1 token")

    def advance(self, turns: Turns) -> Turns:
        """Return the turns with a tenant in front whose deficit is positive; a pure function.

        Turns are passed on until one is, at one go: its time does not depend on how negative the
        deficits are. Where the first one's is positive already, nothing changes.
        """
        if not turns or turns[0].deficit > 0:
            return turns
        waiting = (*turns[1:], turns[0])  # in the order in which their next turns come
        rounds = [max(1, -turn.deficit // self.quantum + 1) for turn in waiting]
        fewest = min(rounds)
        first = rounds.index(fewest)
        granted = [
            turn._replace(deficit=turn.deficit + self.quantum * (fewest - (place > first)))
            for place, turn in enumerate(waiting)
        ]
        return (*granted[first:], *granted[:first])

    def charge(self, turns: Turns, tenant: str, tokens: int) -> Turns:
        """Return the turns after tokens of a tenant were computed; a pure function."""
        return tuple(
            turn._replace(deficit=turn.deficit - tokens) if turn.tenant == tenant else turn
            for turn in turns
        )
