"""KeyGuesses: how many different wrong keys an address may try.

A client whose key is wrong sends the same one again and again; whoever guesses sends others. So
wrong keys count once. An address may try 10, and gets one more every 6 seconds. Beyond that its
keys are not looked at, except those that it has sent before and those of the form that
``midfill keys`` makes: 256 random bits can't be guessed. Clients that share an address with
somebody who guesses, behind a router for instance, are thus let in as ever.
"""

import ipaddress
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from midfill.errors import RateLimitError

MAX_GUESSES = 10
"""Different wrong keys that an address may send at once."""

GUESS_SECONDS = 6.0
"""Time after which it may send one more."""

_MAX_ADDRESSES = 4096
_MAX_KEYS = 64  # of an address that are remembered; right and wrong ones
_DIGEST_BYTES = 8  # of each
_MADE_KEY = re.compile(rb"mf-[A-Za-z0-9_-]{43}")
_NETWORK_BITS = 64  # of an IPv6 address; who has one has the whole network


@dataclass(slots=True)
class _Address:
    """What an address has sent: digests of its keys, the last one last, and what it may guess."""

    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    guesses: float = MAX_GUESSES
    counted: float = 0.0


class KeyGuesses:
    """The addresses that have sent keys lately; those that were silent longest are forgotten.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def check(self, host: str, key: bytes, digest: bytes) -> None:
        """Check that a key may be looked at.

        Args:
            host: the client's address.
            key: what it has sent.
            digest: of it.

        Raises:
            RateLimitError: too many wrong ones have come from there.
        """
        address = self._addresses.get(_network(host))
        if address is None or digest[:_DIGEST_BYTES] in address.seen or _MADE_KEY.fullmatch(key):
            return
        self._refill(address)
        if address.guesses < 1:
            wait = max(1, math.ceil((1 - address.guesses) * GUESS_SECONDS))
            raise RateLimitError(
                f"too many wrong API keys have come from this address; try again in {wait} s",
                retry_after=wait,
            )

    def record(self, host: str, key: bytes, digest: bytes, *, right: bool) -> None:
        """Record a key that was looked at; see ``check``."""
        name = _network(host)
        address = self._addresses.setdefault(name, _Address(counted=self._clock()))
        self._addresses.move_to_end(name)
        if len(self._addresses) > _MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        if (
            not right
            and digest[:_DIGEST_BYTES] not in address.seen
            and not _MADE_KEY.fullmatch(key)
        ):
            self._refill(address)
            address.guesses -= 1
        address.seen[digest[:_DIGEST_BYTES]] = None
        address.seen.move_to_end(digest[:_DIGEST_BYTES])
        if len(address.seen) > _MAX_KEYS:
            address.seen.popitem(last=False)

    def _refill(self, address: _Address) -> None:
        now = self._clock()
        gained = (now - address.counted) / GUESS_SECONDS
        address.guesses = min(MAX_GUESSES, address.guesses + gained)
        address.counted = now


def _network(host: str) -> str:
    """Return what stands for a client: its address, or its network where it has many addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]
    if address.version == 4 or address.ipv4_mapped is not None:
        return host
    return str(int(address) >> (address.max_prefixlen - _NETWORK_BITS))
