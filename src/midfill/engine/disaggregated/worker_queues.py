"""What waits for prefill and decode workers, and what they hold.

When a worker takes the next request is decided by ``engine.disaggregated.workers``, which the
simulator calls, too. Here are the queues of real ones: places of requests, entered with ``with``,
so that a request that ends, in whatever way, leaves nothing behind.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from midfill.engine.disaggregated.workers import DecodeLimits, PrefillLimits, prefill_batch
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineRequest


class WorkerEngine(Protocol):
    """What is asked of a worker's engine; see ``EngineClient``."""

    @property
    def state(self) -> str: ...
    @property
    def retry_after(self) -> int: ...
    def submit(self, *requests: EngineRequest) -> OutputStream: ...
    async def cached_tokens(self, tenant: str, token_ids: Sequence[int]) -> int: ...
    async def export_kv(
        self, tenant: str, token_ids: Sequence[int], start: int = 0
    ) -> memoryview: ...
    async def import_kv(
        self, tenant: str, blob: bytes | memoryview, before: Sequence[int] = ()
    ) -> int: ...


class WorkerQueue(ABC):
    """A worker of either kind, as ``routing`` sees it.

    Args:
        address: its name, such as "prefill 0".
        engine: its engine.

    Attributes:
        whole_requests: requests that it serves without handing anything over.
    """

    slots = 4
    """So many prompts wait for each other, or so many answers slow each other down, that a further
    request had better go where its document's KV is not."""

    def __init__(self, address: str, engine: WorkerEngine) -> None:
        self.address, self.engine = address, engine
        self.whole_requests = 0

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests that keep it busy, or will."""

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Enter a request that is served here from where it stands to its end."""
        self.whole_requests += 1
        try:
            yield
        finally:
            self.whole_requests -= 1


class PrefillQueue(WorkerQueue):
    """A prefill worker and the prompts that wait for it, first come, first served.

    Args:
        address, engine: of the worker.
        limits: what it may take.

    Attributes:
        held: pages of prompts in flight, and of those that were not pulled.
        waiting: prompts that wait for their turn.
        computing: prompts that have had it and are not computed.
    """

    def __init__(self, address: str, engine: WorkerEngine, limits: PrefillLimits) -> None:
        super().__init__(address, engine)
        self.limits = limits
        self.held = 0
        self.waiting = deque[HeldPrompt]()
        self.computing = 0

    @property
    def running(self) -> int:
        """Prompts that are not computed yet, and requests that are served here as a whole."""
        return len(self.waiting) + self.computing + self.whole_requests

    def holding(self, tokens: int) -> "HeldPrompt":
        """Return a prompt's place, to be entered."""
        return HeldPrompt(self, tokens)

    def start(self) -> None:
        """Start what may run now."""
        if self.computing and self.limits.whole_batches:
            return
        prompts = [prompt.tokens for prompt in self.waiting]
        for _ in range(prefill_batch(self.limits, prompts, self.held)):
            self.waiting.popleft().start()


class HeldPrompt:
    """A prompt's place at a prefill worker, from its arrival until its KV is pulled."""

    def __init__(self, queue: PrefillQueue, tokens: int) -> None:
        self.tokens = tokens
        self._queue = queue
        self._pages = queue.limits.pool.pages_of(tokens)
        self._turn = asyncio.get_running_loop().create_future()
        self._runs = self._holds = False

    def __enter__(self) -> "HeldPrompt":
        self._queue.waiting.append(self)
        self._queue.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._queue.waiting:
            self._queue.waiting.remove(self)
        self.computed()
        self.release()
        self._queue.start()  # what stood behind it

    def start(self) -> None:
        """Give it its turn."""
        self._runs = self._holds = True
        self._queue.computing += 1
        self._queue.held += self._pages
        if not self._turn.done():
            self._turn.set_result(None)

    async def turn(self) -> None:
        """Wait until it is to be computed."""
        await self._turn

    def computed(self) -> None:
        """Record that it runs no more; the next batch starts with the last one of this."""
        if self._runs:
            self._runs = False
            self._queue.computing -= 1
            self._queue.start()

    def release(self) -> None:
        """Record that its KV was pulled, or is needed no more."""
        if self._holds:
            self._holds = False
            self._queue.held -= self._pages
            self._queue.start()


class DecodeQueue(WorkerQueue):
    """A decode worker and its requests.

    Args:
        address, engine: of the worker.
        limits: what it may take.

    Attributes:
        requests: that were handed over to it, pulled or not.
        bridge: requests that have not pulled their KV yet.
        pulled: pages of prompts that were pulled and have no token yet.
        decoding: requests that have one.
    """

    def __init__(self, address: str, engine: WorkerEngine, limits: DecodeLimits) -> None:
        super().__init__(address, engine)
        self.limits = limits
        self.requests = 0
        self.bridge = deque[ServedRequest]()
        self.pulled = 0
        self.decoding: set[ServedRequest] = set()

    @property
    def running(self) -> int:
        """Requests that are here, or on their way."""
        return self.requests + self.whole_requests

    def serving(self, request: EngineRequest) -> "ServedRequest":
        """Return a request's place, to be entered."""
        return ServedRequest(self, len(request.token_ids))

    def start(self) -> None:
        """Let requests pull their KV, in order, as long as there is room."""
        pages_of = self.limits.pool.pages_of
        while self.bridge:
            first = self.bridge[0]
            used = sum(pages_of(request.tokens + 1) for request in self.decoding)
            free = self.limits.pool.pages - used - self.pulled
            idle = not self.decoding and not self.pulled
            if not idle and not self.limits.pulls(first.prompt, self.pulled, free):
                return
            self.bridge.popleft().pull()


class ServedRequest:
    """A request's place at a decode worker.

    Attributes:
        prompt: tokens of its prompt.
        tokens: of its context.
        room: done when the worker has room for the prompt's KV, which was asked for.
    """

    def __init__(self, queue: DecodeQueue, prompt: int) -> None:
        self.prompt = self.tokens = prompt
        self._queue = queue
        self.room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pulls = False

    def __enter__(self) -> "ServedRequest":
        self._queue.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        queue = self._queue
        queue.requests -= 1
        if self in queue.bridge:
            queue.bridge.remove(self)
        self._end_pull()
        queue.decoding.discard(self)
        queue.start()

    def has_room(self) -> bool:
        """Ask for room for the prompt's KV; return whether there is any now."""
        self._queue.bridge.append(self)
        self._queue.start()
        return self._pulls

    def pull(self) -> None:
        """Let it pull its KV."""
        self._pulls = True
        self._queue.pulled += self._queue.limits.pulled_pages(self.prompt)
        if not self.room.done():
            self.room.set_result(None)

    def decoded(self, tokens: int) -> None:
        """Record that it has tokens more."""
        if self not in self._queue.decoding:
            self._end_pull()
            self._queue.decoding.add(self)
            self._queue.start()
        self.tokens += tokens

    def _end_pull(self) -> None:
        if self._pulls:
            self._pulls = False
            self._queue.pulled -= self._queue.limits.pulled_pages(self.prompt)
