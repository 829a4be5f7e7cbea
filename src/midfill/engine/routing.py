"""Which server or replica gets a document's requests: pure functions of the targets and their load.

*Rendezvous hashing* (Thaler and Ravishankar, 1998): each target gets a score from the document and
its own address, and the highest score wins. A target that is added takes only the documents that
it wins; those of one that is lost go to their second choice, and no others move.

*Bounded loads* (Mirrokni, Thorup and Zadimoghaddam, 2018): a target with much more than its share
of the requests in progress is passed over, and the next choice takes the request. It has to compute
the whole prompt, so that is done only where a queue would cost more.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

DEFAULT_SLOTS = 32
"""Of a target that doesn't tell how many it has. Passed over earlier, documents would be computed
anew elsewhere, which costs more than waiting and fills the next target (``midfill bench
cluster-simulation``)."""

_SHARE = 1.25  # of the mean load that a target may have
_FIRST_IDS = 64  # of a prompt without a document, which say where it goes


class Loaded(Protocol):
    """What routing looks at."""

    @property
    def address(self) -> str:
        """What the target is known by; never changes."""

    @property
    def running(self) -> int:
        """Requests in progress."""

    @property
    def slots(self) -> int:
        """How many requests it can run at once without slowing each other much."""


T = TypeVar("T", bound=Loaded)


def score(document: str, address: str) -> int:
    """Return how well a target suits a document."""
    key = hashlib.blake2b(address.encode(errors="replace"), digest_size=32).digest()
    text = document.encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest())


def preference(document: str, targets: Iterable[T]) -> list[T]:
    """Return targets in the order in which they suit a document."""
    return sorted(
        targets,
        key=lambda each: (score(document, each.address), each.address),
        reverse=True,
    )


def order(document: str, targets: Sequence[T]) -> list[T]:
    """Return targets in the order in which a document's next request tries them.

    Those that are not overloaded come first, in order of preference; the others follow, those with
    the least to do first.
    """
    if not targets:
        return []
    mean = (sum(each.running for each in targets) + 1) / len(targets)
    bound = math.ceil(_SHARE * mean)
    ordered = preference(document, targets)
    fit = [each for each in ordered if each.running < max(each.slots, bound)]
    overloaded = [each for each in ordered if each.running >= max(each.slots, bound)]
    return [*fit, *sorted(overloaded, key=lambda each: each.running)]


def choose(document: str, targets: Sequence[T]) -> T | None:
    """Return the target for a document's next request; None if there are none.

    It is the first in order of preference that is not overloaded.
    """
    return next(iter(order(document, targets)), None)


def document_key(tenant: str, document: str) -> str:
    """Return what stands for a tenant's document; no two have the same."""
    return f"{len(tenant)}:{tenant}:{document}"


def program_key(tenant: str, program: str) -> str:
    """Return what stands for a tenant's program; no two, and no document, have the same."""
    return f"program {document_key(tenant, program)}"


def request_key(tenant: str, document: str, token_ids: Sequence[int], program: str = "") -> str:
    """Return what a request's target is chosen by.

    Args:
        tenant: whose request it is.
        document: the planner's id of its document; "" if there is none, and then its first tokens
            stand for one.
        token_ids: its prompt.
        program: what it is a step of; the whole program then has one target. "" for none.
    """
    if program:
        return program_key(tenant, program)
    if not document:
        first = str(list(token_ids[:_FIRST_IDS]))
        document = hashlib.blake2b(first.encode(), digest_size=8).hexdigest()
    return document_key(tenant, document)
