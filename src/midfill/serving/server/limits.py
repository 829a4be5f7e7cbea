"""Limits per tenant: requests and tokens per minute, and answers in progress.

Rates are token buckets that hold a minute's worth: a tenant that was quiet may use all of it at
once. A request is charged for its prompt when its generation starts and for its answer when that
has ended, since nobody knows before how long it gets. So the last request of a minute may take more
than is left; the next ones wait until that is paid back. Libraries for rates (limits,
pyrate-limiter) don't do that: they refuse a charge that exceeds what is left, and forget it.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from midfill.errors import RateLimitError

_MINUTE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may do; None is no limit.

    Attributes:
        requests: POST requests per minute.
        tokens: tokens per minute, of prompts and answers; cached ones count, too.
        running: requests whose answers are generated at the same time, those in the queue included.
    """

    requests: int | None = None
    tokens: int | None = None
    running: int | None = None


NO_LIMITS = TenantLimits()


@dataclass(slots=True)
class _Bucket:
    """What is left of a rate. A new one is full."""

    level: float = math.inf
    filled: float = 0.0

    def refill(self, per_minute: int, now: float) -> None:
        gained = (now - self.filled) * per_minute / _MINUTE
        self.level = min(per_minute, self.level + gained)
        self.filled = now

    def seconds_until(self, level: float, per_minute: int) -> float:
        return (level - self.level) * _MINUTE / per_minute


@dataclass(slots=True)
class _Usage:
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    running: int = 0


class Charge:
    """What a request in progress costs beyond its prompt; set before it ends.

    Attributes:
        tokens: of its answers.
    """

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = 0


class RateLimits:
    """Counts what tenants use, and refuses what is beyond their limits.

    Args:
        limits_of: a tenant's limits, which may change at any time.
        clock: seconds, for tests.

    Attributes:
        idle: set while no request generates.
    """

    def __init__(
        self,
        limits_of: Callable[[str], TenantLimits] = lambda _: NO_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self.idle = asyncio.Event()
        self.idle.set()
        self._running = 0
        self._usage: dict[str, _Usage] = {}

    def count_request(self, tenant: str) -> None:
        """Count a request that has arrived.

        Raises:
            RateLimitError: it is one too many; it isn't counted then.
        """
        limit = self._limits_of(tenant).requests
        if limit is None:
            return
        bucket = self._of(tenant).requests
        bucket.refill(limit, self._clock())
        if bucket.level < 1:
            raise _too_many(f"{limit} requests per minute", bucket.seconds_until(1, limit))
        bucket.level -= 1

    @contextlib.contextmanager
    def generating(self, tenant: str, prompt_tokens: int) -> Iterator[Charge]:
        """Count a request's answers and tokens while it generates.

        Args:
            tenant: who asks.
            prompt_tokens: of all its prompts.

        Raises:
            RateLimitError: it is one too many at a time, or no tokens are left.
        """
        limits = self._limits_of(tenant)
        usage = self._of(tenant)
        if limits.running is not None and usage.running >= limits.running:
            raise _too_many(f"{limits.running} requests at a time", 1)
        if limits.tokens is not None:
            usage.tokens.refill(limits.tokens, self._clock())
            if usage.tokens.level < 1:
                wait = usage.tokens.seconds_until(1, limits.tokens)
                raise _too_many(f"{limits.tokens} tokens per minute", wait)
        usage.tokens.level -= prompt_tokens
        usage.running += 1
        self._count_running(1)
        charge = Charge()
        try:
            yield charge
        finally:
            usage.running -= 1
            self._count_running(-1)
            usage.tokens.level -= charge.tokens

    def _count_running(self, more: int) -> None:
        self._running += more
        if self._running:
            self.idle.clear()
        else:
            self.idle.set()

    def _of(self, tenant: str) -> _Usage:
        return self._usage.setdefault(tenant, _Usage())


def _too_many(limit: str, seconds: float) -> RateLimitError:
    wait = max(1, math.ceil(seconds))
    return RateLimitError(
        f"this API key's limit is {limit}; try again in {wait} s", retry_after=wait
    )
