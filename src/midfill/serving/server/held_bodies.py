"""HeldBodies: request bodies while they are received and decoded share a budget of memory."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from midfill.serving.server.responses import ApiError

_MAX_BYTES = 1 << 27
_FREE_BYTES = 1 << 16
_RETRY_SECONDS = 1


class HeldBodies:
    """The bodies that are held at a time.

    Where the budget is used up, the body that has grown least recently gives way to the one that
    grows, so uploads that stall hold nothing up. The first bytes of each body are free: connections
    are bounded, and requests of usual sizes are not concerned.

    Args:
        max_bytes: the budget. A body that is held alone may be larger.
        free_bytes: of each body.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, free_bytes: int = _FREE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._counted_bytes = 0
        self._growing: OrderedDict[HeldBody, asyncio.Timeout] = OrderedDict()

    @contextmanager
    def body(self) -> "Iterator[HeldBody]":
        """Hold a new body for as long as the block runs."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self._release(body)

    async def receive(self, body: "HeldBody", chunks: AsyncIterator[bytes]) -> None:
        """Let a body grow; see ``HeldBody.read``."""
        async for chunk in chunks:
            body.append(chunk)
            if body.size > self._free_bytes:
                break
        else:
            return
        try:
            async with asyncio.timeout(None) as timeout:
                self._growing[body] = timeout
                self._count(body)
                async for chunk in chunks:
                    body.append(chunk)
                    self._count(body)
        except TimeoutError:
            if timeout.expired():
                raise _too_much() from None
            raise
        finally:
            self._growing.pop(body, None)

    def _count(self, body: "HeldBody") -> None:
        if body not in self._growing:  # it gave way in this turn of the event loop
            raise _too_much()
        more = max(body.size - self._free_bytes, 0) - body.counted
        body.counted += more
        self._counted_bytes += more
        self._growing.move_to_end(body)
        while self._max_bytes < self._counted_bytes != body.counted:
            oldest = next(each for each in self._growing if each.counted)
            if oldest is body:  # the others are complete
                raise _too_much()
            self._growing.pop(oldest).reschedule(asyncio.get_running_loop().time())
            self._release(oldest)

    def _release(self, body: "HeldBody") -> None:
        self._counted_bytes -= body.counted
        body.drop()


def _too_much() -> ApiError:
    return ApiError(
        503,
        "too much is being sent to this server at once; try again in a moment",
        code="too_many_bytes",
        headers={"retry-after": str(_RETRY_SECONDS)},
    )


class HeldBody:
    """One body of ``HeldBodies``.

    Attributes:
        size: bytes that have arrived.
        counted: how many of them count.
    """

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self._chunks: list[bytes] = []
        self.size = self.counted = 0

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Take all of a body as it arrives.

        Raises:
            ApiError: it had to give way, with status 503.
        """
        await self._bodies.receive(self, chunks)

    def append(self, chunk: bytes) -> None:
        """Add what has arrived."""
        self._chunks.append(chunk)
        self.size += len(chunk)

    def drop(self) -> None:
        """Hold nothing of it any more."""
        self.counted = 0
        self._chunks.clear()

    def take(self) -> bytes:
        """Return what has arrived, and hold it no more; it counts until the block ends."""
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)
