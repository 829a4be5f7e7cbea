"""Which upstream a document's requests go to: pure functions of the upstreams and their load.

*Rendezvous hashing* (Thaler and Ravishankar, 1998): each upstream gets a score from the document
and its own address, and the highest score wins. An upstream that is added takes only the documents
that it wins; those of one that is lost go to their second choice, and no others move.

*Bounded loads* (Mirrokni, Thorup and Zadimoghaddam, 2018): an upstream with much more than its
share of the requests in progress is passed over, and the next choice takes the request. It has to
compute the whole prompt, so that is done only where a queue would cost more.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

_SHARE = 1.25  # of the mean load that an upstream may have


class Loaded(Protocol):
    """What routing looks at."""

    @property
    def address(self) -> str:
        """What the upstream is known by; never changes."""
        ...

    @property
    def running(self) -> int:
        """Requests in progress."""
        ...

    @property
    def slots(self) -> int:
        """As many requests run at once without much harm."""
        ...


T = TypeVar("T", bound=Loaded)


def score(document: str, address: str) -> int:
    """Return how well an upstream suits a document."""
    key = hashlib.blake2b(address.encode(errors="replace"), digest_size=32).digest()
    text = document.encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest())


def preference(document: str, upstreams: Iterable[T]) -> list[T]:
    """Return upstreams in the order in which they suit a document."""
    return sorted(
        upstreams,
        key=lambda each: (score(document, each.address), each.address),
        reverse=True,
    )


def choose(document: str, upstreams: Sequence[T]) -> T | None:
    """Return the upstream for a document's next request; None if there are none.

    It is the first in order of preference that is not overloaded.
    """
    if not upstreams:
        return None
    mean = (sum(each.running for each in upstreams) + 1) / len(upstreams)
    ordered = preference(document, upstreams)
    for each in ordered:
        if each.running < max(each.slots, math.ceil(_SHARE * mean)):
            return each
    return min(ordered, key=lambda each: each.running)


def document_key(tenant: str, document: str) -> str:
    """Return what stands for a tenant's document; no two have the same."""
    return f"{len(tenant)}:{tenant}:{document}"
