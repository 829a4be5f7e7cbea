"""Admission: which requests may be queued, so that what is accepted is answered in time.

A request is refused where too many prompt tokens are queued, in all or by its tenant, and where it
would probably wait past its deadline. A refusal that comes at once, and says when to try again, is
worth more to a client than an answer that comes too late, and costs the others nothing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from midfill.engine.request import EngineRequest
from midfill.errors import QueueFullError

_MEMORY_SECONDS = 10.0  # how far back the queue's speed is measured
_LEAST_SECONDS = 1.0  # of measuring, before the speed is believed
_SAFETY = 0.7  # share of the time until a deadline that a request may wait in the queue
_MAX_RETRY_SECONDS = 60


class _Queued(NamedTuple):
    """A request without an output: its tenant, and its prompt's tokens."""

    tenant: str
    tokens: int


@dataclass(slots=True)
class _TenantQueue:
    """What a tenant has queued."""

    requests: int = 0
    tokens: int = 0


class Admission:
    """The prompt tokens of requests that have produced no output yet; background ones don't count.

    Times are ``time.monotonic``'s.

    Args:
        max_tokens: maximum over all tenants.
        max_tenant_tokens: maximum of each tenant; None is half of ``max_tokens`` where another
            tenant has requests queued, too.

    Attributes:
        queued_tokens: the tokens now.
    """

    def __init__(self, max_tokens: int, max_tenant_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._max_tenant_tokens = max_tenant_tokens
        self._queued: dict[str, _Queued] = {}
        self._tenants: dict[str, _TenantQueue] = {}
        self._speed = QueueSpeed()
        self.queued_tokens = 0

    def check(self, tenant: str, tokens: int, deadline: float | None, now: float) -> None:
        """Refuse a request that may not be queued.

        One whose tenant has nothing queued is refused only where too much is queued in all, and
        one that comes alone never.

        Args:
            tenant: whose it is.
            tokens: of its prompts; 0 where they are not known yet.
            deadline: when its client gives up; None is never.
            now: the time.

        Raises:
            QueueFullError: too much is queued.
        """
        if not self._queued:
            return
        if self.queued_tokens + tokens > self._max_tokens:
            raise self._full(self.queued_tokens, tokens, self._max_tokens, "")
        own = self._tokens_of(tenant)
        bound = self._tenant_bound(tenant)
        if own and own + tokens > bound:
            raise self._full(own, tokens, bound, " of yours")
        if deadline is None:
            return
        wait, left = self.expected_wait(tenant), _SAFETY * (deadline - now)
        if wait > left:
            raise QueueFullError(
                f"the queue is about {wait:.0f} s long, too long for a request that has"
                f" {max(deadline - now, 0.0):.0f} s. Try again in a moment",
                retry_after=_retry(wait - left),
            )

    def add(self, requests: Iterable[EngineRequest], now: float) -> None:
        """Queue requests."""
        for one in requests:
            if one.background:
                continue
            if not self._queued:
                self._speed.resume(now)
            queued = _Queued(one.tenant, len(one.token_ids))
            self._queued[one.request_id] = queued
            tenant = self._tenants.setdefault(one.tenant, _TenantQueue())
            tenant.requests += 1
            tenant.tokens += queued.tokens
            self.queued_tokens += queued.tokens

    def remove(self, request_id: str, now: float, *, answered: bool) -> None:
        """Remove a request that has its first output, or has ended without any."""
        one = self._queued.pop(request_id, None)
        if one is None:
            return
        self.queued_tokens -= one.tokens
        tenant = self._tenants[one.tenant]
        tenant.requests -= 1
        tenant.tokens -= one.tokens
        if not tenant.requests:
            del self._tenants[one.tenant]
        if answered:
            self._speed.record(one.tokens, now)

    def clear(self) -> None:
        """Remove all requests: the engine has ended."""
        self._queued.clear()
        self._tenants.clear()
        self._speed = QueueSpeed()
        self.queued_tokens = 0

    def expected_wait(self, tenant: str) -> float:
        """Return how many seconds a new request of a tenant will probably be queued."""
        # Tenants take turns, so only as much of the others' comes first as of its own.
        turns = len(self._tenants) + (tenant not in self._tenants)
        return self._speed.seconds(min(self.queued_tokens, self._tokens_of(tenant) * turns))

    def _tokens_of(self, tenant: str) -> int:
        queued = self._tenants.get(tenant)
        return 0 if queued is None else queued.tokens

    def _tenant_bound(self, tenant: str) -> int:
        if self._max_tenant_tokens is not None:
            return self._max_tenant_tokens
        is_alone = len(self._tenants) <= 1 and tenant in self._tenants
        return self._max_tokens if is_alone else self._max_tokens // 2

    def _full(self, queued: int, tokens: int, bound: int, whose: str) -> QueueFullError:
        excess = self._speed.seconds(max(queued + tokens - bound, 0))
        return QueueFullError(
            f"{queued} prompt tokens{whose} are queued and this request has {tokens};"
            f" at most {bound} are queued. Try again in a moment",
            retry_after=_retry(excess),
        )


class QueueSpeed:
    """How many prompt tokens leave the queue per second, while there is a queue.

    The last seconds count more than those before.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._last = 0.0

    def resume(self, now: float) -> None:
        """Note that there is a queue again."""
        self._last = now

    def record(self, tokens: int, now: float) -> None:
        """Note that tokens have left a queue that there has been since the last call."""
        passed, self._last = max(now - self._last, 0.0), now
        share = math.exp(-passed / _MEMORY_SECONDS)
        self._tokens = self._tokens * share + tokens
        self._seconds = self._seconds * share + passed

    def seconds(self, tokens: int) -> float:
        """Return how long so many tokens will take; 0 as long as nothing is known."""
        if self._seconds < _LEAST_SECONDS or not self._tokens:
            return 0.0
        return tokens * self._seconds / self._tokens


def _retry(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), _MAX_RETRY_SECONDS)
