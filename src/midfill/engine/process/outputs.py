"""OutputStream: what the engine sends for some requests, as a client waits for it."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakSet

from midfill.engine.request import EngineOutput, EngineRequest
from midfill.errors import GenerationError, MidfillError

MAX_UNDELIVERED = 4096
"""Outputs that may wait in a stream for whoever reads it. A token or more each, they are few
megabytes; a client that reads at all is never so far behind."""


_streams: "WeakSet[OutputStream]" = WeakSet()


def undelivered_outputs() -> int:
    """Return how many outputs wait in all streams of this process for whoever reads them."""
    return sum(stream.undelivered for stream in tuple(_streams))


class RequestOwner(Protocol):
    """Who sends the requests of a stream to the engine, and routes their outputs."""

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Have the engine end a request, or one of its answers, if it is unfinished."""

    def forget(self, request_id: str) -> None:
        """Route no more outputs of a request."""


class OutputStream(AsyncIterator[EngineOutput]):
    """The outputs of some requests in the order they arrive; ends when every answer has ended.

    Leaving the ``with`` block cancels what is unfinished.
    """

    def __init__(self, owner: RequestOwner, requests: tuple[EngineRequest, ...]) -> None:
        self._owner = owner
        self._queue: asyncio.Queue[EngineOutput | MidfillError | None] = asyncio.Queue()
        self._unfinished = {
            request.request_id: set(range(request.sampling.n)) for request in requests
        }
        self._has_overflowed = False
        self._absorbed_by: OutputStream | None = None
        _streams.add(self)

    @property
    def undelivered(self) -> int:
        """Number of outputs that nobody has read yet."""
        return self._queue.qsize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __anext__(self) -> EngineOutput:
        """Return the next output.

        Raises:
            InvalidRequestError: the engine can never run one of the requests.
            GenerationError: the engine failed on one of them, or outputs were read too slowly.
            EngineDeadError: the engine process ended.
        """
        while self._unfinished:
            item = await self._queue.get()
            if item is None:
                break
            if isinstance(item, MidfillError):
                raise item
            answers = self._unfinished.get(item.request_id, set())
            if item.index not in answers:
                continue  # cancelled while it was on its way
            if item.finish_reason is not None:
                answers.remove(item.index)
                if not answers:
                    del self._unfinished[item.request_id]
                    self._owner.forget(item.request_id)
            return item
        if self._has_overflowed:
            raise GenerationError("the client reads its answer too slowly")
        raise StopAsyncIteration

    def put(self, item: EngineOutput | MidfillError) -> None:
        """Queue an output, or the error that the stream ends with. Called by the owner."""
        if self._absorbed_by is not None:
            self._absorbed_by.put(item)
            return
        if self._queue.qsize() >= MAX_UNDELIVERED and self._unfinished:
            self._has_overflowed = True
            self.close()
            self._queue = asyncio.Queue()
            return
        self._queue.put_nowait(item)

    def absorb(self, other: "OutputStream") -> None:
        """Yield the outputs of another stream of the same owner, too, from now on."""
        self._unfinished.update(other._unfinished)
        other._unfinished = {}
        other._absorbed_by = self
        while not other._queue.empty():
            self._queue.put_nowait(other._queue.get_nowait())

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End one of the requests, or one of its answers; it yields no more outputs."""
        answers = self._unfinished.get(request_id, set())
        if index is not None and answers != {index}:
            if index in answers:
                answers.remove(index)
                self._owner.cancel(request_id, index)
        elif answers:
            del self._unfinished[request_id]
            self._owner.cancel(request_id)
            self._owner.forget(request_id)

    def end(self) -> None:
        """Cancel all that is unfinished; whoever waits for an output finds the stream ended."""
        self.close()
        self._queue.put_nowait(None)

    def close(self) -> None:
        """Cancel all that is unfinished."""
        for request_id in list(self._unfinished):
            self.cancel(request_id)
