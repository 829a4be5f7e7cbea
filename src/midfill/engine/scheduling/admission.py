"""Admission: which requests may be queued, so that what is accepted is answered in time.

A request is refused where too many prompt tokens are queued, in all or by its tenant, and where it
would probably not be answered by its deadline. A refusal that comes at once, and says when to try
again, is worth more to a client than an answer that comes too late, and costs the others nothing.
``Deadlines`` tells which accepted requests nobody waits for any more.

Where a queue is long, most of it is for documents whose KV is probably cached. Otherwise, with more
documents in use than the cache holds, each would find its KV evicted by the others: every request
would cost a whole prompt, and far fewer would be answered. The others have a short part of the
queue, and a part of the engine's time whatever its length, so each has its turn in the end.

The server that admits requests doesn't see the engine's cache. It knows what earlier prompts of a
document cost (``ExpectedWork``), and which documents came after it: the cache evicts what was used
longest ago, so a document's KV is probably there as long as those that were used since leave room
for it.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from midfill.engine.request import EngineOutput, EngineRequest
from midfill.errors import QueueFullError

_MEMORY_SECONDS = 10.0  # how far back the queue's speed is measured
_MIN_SECONDS = 1.0  # of measuring, before the speed is believed
_SAFETY = 0.7  # share of the time until a deadline that a request may wait in the queue
_NEW_SAFETY = 0.1  # the same for a document whose KV isn't cached
_NEW_SHARE = 0.1  # of what is computed, for such documents however long the queue is
_NEW_TOKENS = 2048  # of that share that are kept for later, at most
_ANSWER_RATE = 0.1  # share by which an answer's time moves the estimate
_MAX_RETRY_SECONDS = 60
_UNANSWERED = ("cancelled", "expired", "error")
NEW_DOCUMENT = "new"
"""Stands for every document that no request was for yet; the planner gives no such id."""

ANSWER_TOKENS = 16
"""What an answer counts for beside its prompt. Its length isn't known, and most are short."""

_MAX_DOCUMENTS = 8192
_RATE = 0.5  # share by which a prompt's cost moves its document's estimate
_HELD_SHARE = 0.75  # of the pool; answers and earlier states of documents take slots, too
_MIN_ENTRIES = 64


class _Queued(NamedTuple):
    """A request without an output.

    Attributes:
        tenant: whose it is.
        document: the planner's id of its document; "" if there is none.
        tokens: of its prompt.
        work: what it counts for, see ``ExpectedWork``.
        whole: whether its client waits for the whole answer.
    """

    tenant: str
    document: str
    tokens: int
    work: float
    whole: bool


@dataclass(slots=True)
class _TenantQueue:
    """What a tenant has queued."""

    requests: int = 0
    tokens: int = 0
    work: float = 0.0


class Admission:
    """The prompt tokens of requests that have produced no output yet; background ones don't count.

    Times are ``time.monotonic``'s.

    Args:
        max_tokens: maximum over all tenants.
        max_tenant_tokens: maximum of each tenant; None is half of ``max_tokens`` where another
            tenant has requests queued, too.

    Attributes:
        queued_tokens: the tokens now.
        work: what documents' prompts cost; whoever knows the size of the KV pool sets its
            ``slots``.
    """

    def __init__(self, max_tokens: int, max_tenant_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._max_tenant_tokens = max_tenant_tokens
        self._queued: dict[str, _Queued] = {}
        self._tenants: dict[str, _TenantQueue] = {}
        self._speed = QueueSpeed()
        self._answering: dict[str, float] = {}  # by request, when its first output came
        self._answer_seconds = 0.0
        self._queued_work = 0.0
        self._left_to_new = 0.0  # tokens
        self.queued_tokens = 0
        self.work = ExpectedWork()

    def check(
        self, tenant: str, tokens: int, deadline: float | None, now: float, document: str = ""
    ) -> None:
        """Refuse a request that may not be queued.

        One whose tenant has nothing queued is refused only where too much is queued in all, and
        one that comes alone never.

        Args:
            tenant: whose it is.
            tokens: of its prompts; 0 where they are not known yet.
            deadline: when its client gives up; None is never.
            now: the time.
            document: the planner's id of its document; "" where it has none or it isn't known yet.

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
        wait, left = self.expected_wait(tenant), max(deadline - now, 0.0)
        keeps = _NEW_SAFETY if self._waits_for_others(document) else _SAFETY
        allowed = keeps * max(left - self._answer_seconds, 0.0)
        if wait > allowed:
            what = "a request" if keeps == _SAFETY else "the first request of a document"
            raise QueueFullError(
                f"the queue is about {wait:.0f} s long, too long for {what} that has"
                f" {left:.0f} s. Try again in a moment",
                retry_after=_retry(wait - allowed),
            )

    def add(self, requests: Iterable[EngineRequest], now: float) -> None:
        """Queue requests."""
        for request in requests:
            if request.background:
                continue
            if not self._queued:
                self._speed.resume(now)
            tokens, whole = len(request.token_ids), math.isinf(request.stream_interval)
            work = self.work.tokens(request.document, tokens)
            if request.document and not self.work.is_cached(request.document):
                self._left_to_new = max(self._left_to_new - work, -float(_NEW_TOKENS))
            queued = _Queued(request.tenant, request.document, tokens, work, whole)
            self._queued[request.request_id] = queued
            tenant = self._tenants.setdefault(request.tenant, _TenantQueue())
            tenant.requests += 1
            tenant.tokens += tokens
            tenant.work += work
            self.queued_tokens += tokens
            self._queued_work += work

    def record(self, output: EngineOutput, now: float) -> None:
        """Take note of an output: with the first one, its request is no longer queued."""
        ended = output.finish_reason is not None
        queued = self._take(output.request_id)
        if queued is not None and output.finish_reason not in _UNANSWERED:
            self._speed.record(queued.work, now)
            computed = max(queued.tokens - (output.cached_tokens or 0), 0)
            self.work.record(queued.document, queued.tokens, computed)
            left = self._left_to_new + _NEW_SHARE * (computed + ANSWER_TOKENS)
            self._left_to_new = min(left, float(_NEW_TOKENS))
            if queued.whole:
                self._answering[output.request_id] = now
        if ended:
            started = self._answering.pop(output.request_id, None)
            if started is not None and output.finish_reason not in _UNANSWERED:
                self._answer_seconds += _ANSWER_RATE * (now - started - self._answer_seconds)

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended without an output, or whose outputs nobody reads."""
        self._take(request_id)
        self._answering.pop(request_id, None)

    def clear(self) -> None:
        """Remove all requests: the engine has ended, and nothing is cached."""
        self._queued.clear()
        self._tenants.clear()
        self._answering.clear()
        self._speed = QueueSpeed()
        self.work.clear()
        self.queued_tokens, self._queued_work = 0, 0.0

    def expected_wait(self, tenant: str) -> float:
        """Return how many seconds a new request of a tenant will probably be queued."""
        # Tenants take turns, so only as much of the others' comes first as of its own.
        turns = len(self._tenants) + (tenant not in self._tenants)
        queued = self._tenants.get(tenant)
        own = 0.0 if queued is None else queued.work
        return self._speed.seconds(min(self._queued_work, own * turns))

    def _take(self, request_id: str) -> _Queued | None:
        """Remove a request from the queue and return it; None if it isn't there."""
        queued = self._queued.pop(request_id, None)
        if queued is None:
            return None
        tenant = self._tenants[queued.tenant]
        tenant.requests -= 1
        tenant.tokens -= queued.tokens
        tenant.work -= queued.work
        if not tenant.requests:
            del self._tenants[queued.tenant]
        self.queued_tokens -= queued.tokens
        self._queued_work = self._queued_work - queued.work if self._queued else 0.0
        return queued

    def _waits_for_others(self, document: str) -> bool:
        """Whether a document's requests have only the short part of the queue."""
        return bool(document) and not self.work.is_cached(document) and self._left_to_new <= 0.0

    def _tokens_of(self, tenant: str) -> int:
        queued = self._tenants.get(tenant)
        return 0 if queued is None else queued.tokens

    def _tenant_bound(self, tenant: str) -> int:
        if self._max_tenant_tokens is not None:
            return self._max_tenant_tokens
        is_alone = len(self._tenants) <= 1 and tenant in self._tenants
        return self._max_tokens if is_alone else self._max_tokens // 2

    def _full(self, queued: int, tokens: int, bound: int, whose: str) -> QueueFullError:
        excess = self._speed.seconds(float(max(queued + tokens - bound, 0)))
        return QueueFullError(
            f"{queued} prompt tokens{whose} are queued and this request has {tokens};"
            f" at most {bound} are queued. Try again in a moment",
            retry_after=_retry(excess),
        )


class QueueSpeed:
    """How many tokens leave the queue per second while it isn't empty.

    The last seconds count more than those before.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._last = 0.0

    def resume(self, now: float) -> None:
        """Note that the queue isn't empty any more."""
        self._last = now

    def record(self, tokens: float, now: float) -> None:
        """Note that tokens have left the queue, which wasn't empty since the last call."""
        passed, self._last = max(now - self._last, 0.0), now
        share = math.exp(-passed / _MEMORY_SECONDS)
        self._tokens = self._tokens * share + tokens
        self._seconds = self._seconds * share + passed

    def seconds(self, tokens: float) -> float:
        """Return how long so many tokens will take; 0 as long as nothing is known."""
        if self._seconds < _MIN_SECONDS or not self._tokens:
            return 0.0
        return tokens * self._seconds / self._tokens


def _retry(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), _MAX_RETRY_SECONDS)


class _Cost(NamedTuple):
    """What a document's last prompts cost: tokens computed, on average, and the last one's size."""

    computed: float
    size: int


class ExpectedWork:
    """What further prompts of documents cost whose KV is probably cached.

    Attributes:
        slots: size of the KV pool in tokens; 0 while it isn't known.
    """

    def __init__(self) -> None:
        self.slots = 0
        self._costs: OrderedDict[str, _Cost] = OrderedDict()  # used longest ago first
        self._size = 0

    def is_cached(self, document: str) -> bool:
        """Whether KV of an earlier prompt of a document is probably cached."""
        return document in self._costs

    def tokens(self, document: str, prompt_tokens: int) -> float:
        """Return what a request counts for: its tokens that are probably not cached, its answer.

        Args:
            document: the planner's id of its document; "" where it has none.
            prompt_tokens: of its prompt.
        """
        known = self._costs.get(document)
        expected = prompt_tokens if known is None else min(known.computed, prompt_tokens)
        return expected + ANSWER_TOKENS

    def record(self, document: str, prompt_tokens: int, computed: int) -> None:
        """Note that a document's prompt is cached now, and how many of its tokens were computed."""
        if not document:
            return
        mean = float(computed)
        before = self._costs.pop(document, None)
        if before is not None:
            mean = before.computed + _RATE * (mean - before.computed)
            self._size -= before.size
        self._costs[document] = _Cost(mean, prompt_tokens)
        self._size += prompt_tokens
        while len(self._costs) > 1 and self._is_too_large():
            _, dropped = self._costs.popitem(last=False)
            self._size -= dropped.size

    def clear(self) -> None:
        """Forget everything: the cache is empty."""
        self._costs.clear()
        self._size = 0

    def _is_too_large(self) -> bool:
        held = self.slots and self._size > _HELD_SHARE * self.slots
        return bool(held) or len(self._costs) > _MAX_DOCUMENTS


class Deadline(NamedTuple):
    """When a request's client gives up.

    Attributes:
        time: by ``time.monotonic``.
        request_id: the request.
        whole: whether it waits for the whole answer then, and not only for the first token.
    """

    time: float
    request_id: str
    whole: bool


class Deadlines:
    """The deadlines of unfinished requests.

    Args:
        is_unfinished: whether a request is unfinished.
    """

    def __init__(self, is_unfinished: Callable[[str], bool]) -> None:
        self._is_unfinished = is_unfinished
        self._heap: list[Deadline] = []
        self._max_entries = _MIN_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: EngineRequest) -> None:
        """Remember a request's deadline, if it has one."""
        if request.deadline is None:
            return
        whole = request.stream_interval == float("inf")
        heapq.heappush(self._heap, Deadline(request.deadline, request.request_id, whole))
        if len(self._heap) > self._max_entries:  # most requests end before their deadlines
            self._heap = [entry for entry in self._heap if self._is_unfinished(entry.request_id)]
            heapq.heapify(self._heap)
            self._max_entries = max(2 * len(self._heap), _MIN_ENTRIES)

    def take_expired(self, now: float) -> list[Deadline]:
        """Return the deadlines that have passed, the earliest first, and forget them."""
        expired: list[Deadline] = []
        while self._heap and self._heap[0].time <= now:
            deadline = heapq.heappop(self._heap)
            if self._is_unfinished(deadline.request_id):
                expired.append(deadline)
        return expired
