"""OutputStream: what the engine sends for some requests, as a client waits for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakSet

import msgspec

from midfill.engine.request import EngineOutput, EngineRequest, TokenLogprobs
from midfill.errors import GenerationError, MidfillError

MAX_UNDELIVERED = 4096
"""Outputs that may wait in a stream for whoever reads it. A token or more each, they are few
megabytes; a client that reads at all is never so far behind."""


_streams: "WeakSet[OutputStream]" = WeakSet()

_SECONDS_PER_STREAM = 0.003
"""Tokens are held at least this long per stream. Sending a message to all streams then takes the
server and the clients about a tenth of the time, measured on two cores."""


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
        if self._queue.qsize() >= MAX_UNDELIVERED and self._unfinished:
            self._has_overflowed = True
            self.close()
            self._queue = asyncio.Queue()
            return
        self._queue.put_nowait(item)

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


@dataclass
class _BufferedAnswer:
    """One unfinished answer.

    Attributes:
        hidden: how many healed bytes it has yet to write before the client sees any text.
        held: outputs not yet sent, oldest first.
        held_since: time of the oldest of them, in seconds.
    """

    hidden: int
    held: list[EngineOutput] = field(default_factory=list)
    held_since: float = 0.0


@dataclass
class _BufferedRequest:
    """One unfinished request; see EngineRequest for ``interval`` and ``stop_bytes``."""

    interval: float
    stop_bytes: frozenset[int]
    answers: dict[int, _BufferedAnswer]


class OutputBuffer:
    """The outputs of all requests on their way to the server.

    Args:
        token_bytes: returns the bytes of a token, b"" for ids that stand for no text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._requests: dict[str, _BufferedRequest] = {}
        self._ready: list[EngineOutput] = []

    def register(self, request: EngineRequest) -> None:
        """Prepare for a request's outputs. Outputs of unknown requests are not held."""
        if request.stream_interval > 0.0 and not request.background:
            hidden = len(request.begins_with)
            self._requests[request.request_id] = _BufferedRequest(
                request.stream_interval,
                frozenset(request.stop_bytes),
                {index: _BufferedAnswer(hidden) for index in range(request.sampling.n)},
            )

    def add(self, outputs: Sequence[EngineOutput], now: float) -> None:
        """Add a step's outputs at time ``now``, in seconds of any clock."""
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                self._ready.append(output)
                continue
            answer = request.answers[output.index]
            if not answer.held:
                answer.held_since = now
            answer.held.append(output)
            if self._is_urgent(output, request, answer):
                self._release(answer)
            if output.finish_reason is not None:
                del request.answers[output.index]
                if not request.answers:
                    del self._requests[output.request_id]

    def take(self, now: float) -> list[EngineOutput]:
        """Return what is to be sent now, and forget it.

        Once one streamed answer has been held long enough, all of them are sent: the server is
        woken anyway.
        """
        waiting = [
            (request.interval, answer)
            for request in self._requests.values()
            if request.interval < inf
            for answer in request.answers.values()
        ]
        minimum = _SECONDS_PER_STREAM * len(waiting)
        if any(
            answer.held and now - answer.held_since >= max(interval, minimum)
            for interval, answer in waiting
        ):
            for _, answer in waiting:
                self._release(answer)
        ready, self._ready = self._ready, []
        return ready

    def _is_urgent(
        self, output: EngineOutput, request: _BufferedRequest, answer: _BufferedAnswer
    ) -> bool:
        """Whether an output has to be sent at once; counts down the answer's hidden bytes."""
        if output.finish_reason is not None:
            return True
        texts = [self._token_bytes(token_id) for token_id in output.token_ids]
        if answer.hidden >= 0:
            answer.hidden -= sum(map(len, texts))
            return True
        return any(not request.stop_bytes.isdisjoint(text) for text in texts)

    def _release(self, answer: _BufferedAnswer) -> None:
        """Let what an answer holds be sent."""
        if answer.held:
            self._ready.append(_join(answer.held))
            answer.held = []


def _join(outputs: list[EngineOutput]) -> EngineOutput:
    """Return consecutive outputs of one answer as one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    logprobs: list[TokenLogprobs] | None = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return msgspec.structs.replace(
        last,
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=logprobs,
        prompt_logprobs=outputs[0].prompt_logprobs,
        prefill_seconds=outputs[0].prefill_seconds,
    )
