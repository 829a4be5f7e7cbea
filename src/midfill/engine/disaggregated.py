"""DisaggregatedEngine: prompts are computed by some engine processes, answers by others.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670). The way of a request:

1. It waits for the prefill worker with the shortest queue. The worker computes the prompt and
   samples the first token, which is sent on at once.
2. The decode worker with the fewest requests pulls the prompt's KV as soon as it has room. Until it
   has confirmed that, the prompt counts as held by the prefill worker, which takes no further ones
   where its pool is full: that pool is the buffer.
3. The decode worker goes on with the answer after its first token. Seed, penalties and what the
   answer has to begin with go with it (``EngineRequest.answered``), so the tokens are those of one
   engine.

KV that can't be moved, or is evicted on the way, is computed again: a transfer changes times, never
answers. What is decided with the first token (whether an answer is empty, several answers to a
prompt, a method, scores of the prompt) can't be handed over; such requests run on a decode worker
alone. There, prompts are computed beside decodes, as in an engine that does both.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from midfill.disaggregation.workers import DecodeLimits, PrefillLimits, prefill_batch
from midfill.engine.output_stream import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest
from midfill.errors import GenerationError, InvalidRequestError, KvTransferError, MidfillError

_log = logging.getLogger(__name__)


class WorkerEngine(Protocol):
    """What is asked of a worker's engine; see ``EngineClient``."""

    def submit(self, *requests: EngineRequest) -> OutputStream: ...
    async def export_kv(self, tenant: str, token_ids: Sequence[int]) -> bytes: ...
    async def import_kv(self, tenant: str, blob: bytes) -> int: ...


class DisaggregatedEngine:
    """Answers requests with workers that have started.

    Args:
        prefill: engines of prefill workers, and their limits.
        decode: engines of decode workers, and their limits.

    Attributes:
        transferred_bytes: of KV, since the start.
        transfer_seconds: that it took, from the first byte's export to the confirmation.

    Raises:
        InvalidRequestError: one of the two kinds is missing.
    """

    def __init__(
        self,
        prefill: Sequence[tuple[WorkerEngine, PrefillLimits]],
        decode: Sequence[tuple[WorkerEngine, DecodeLimits]],
    ) -> None:
        for kind, workers in (("prefill", prefill), ("decode", decode)):
            if not workers:
                raise InvalidRequestError(f"there is no {kind} worker; at least one is needed")
        self.transferred_bytes = 0
        self.transfer_seconds = 0.0
        self._prefill = [_PrefillQueue(engine, limits) for engine, limits in prefill]
        self._decode = [_DecodeQueue(engine, limits) for engine, limits in decode]
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def held_tokens(self) -> int:
        """Tokens of prompts that prefill workers hold: in flight, or computed and not pulled."""
        return sum(worker.held for worker in self._prefill)

    @property
    def unfinished(self) -> int:
        """Requests in progress."""
        return len(self._tasks)

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Start requests, all or none; the stream yields their outputs.

        Raises:
            InvalidRequestError: one of them fits no worker.
        """
        for request in requests:
            self._check(request)
        stream = OutputStream(self, requests)
        for request in requests:
            task = asyncio.create_task(self._answer(request, stream), name="disaggregated request")
            self._tasks[request.request_id] = task
            # Not in the task itself: one that is cancelled before it starts would stay.
            task.add_done_callback(partial(self._forget_task, request.request_id))
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, wherever it is. One of several answers is not ended, only ignored."""
        if index is None and (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def forget(self, request_id: str) -> None:
        """Do nothing: a task that has told the last of its outputs ends by itself."""

    async def close(self) -> None:
        """End all requests."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _check(self, request: EngineRequest) -> None:
        """Refuse a request that no worker could ever serve.

        Raises:
            InvalidRequestError: its prompt is too long.
        """
        tokens = len(request.token_ids)
        fits = all(worker.limits.admits(tokens) for worker in self._prefill)
        if not fits or not all(worker.limits.admits(tokens + 2) for worker in self._decode):
            raise InvalidRequestError(
                f"the prompt has {tokens} tokens, which is too long for the workers' KV memory",
                param="prompt",
                code="context_length_exceeded",
            )

    async def _answer(self, request: EngineRequest, stream: OutputStream) -> None:
        """Answer a request; errors go to the stream."""
        try:
            decode = min(self._decode, key=lambda worker: worker.requests)
            if hands_over(request):
                await self._hand_over(request, stream)
            else:
                with decode.serving(request) as served:
                    await served.forward(request, stream)
        except MidfillError as error:
            stream.put(error)
        except Exception:
            _log.exception("a request failed between workers")
            stream.put(GenerationError("the workers failed on this request; the log says why"))

    def _forget_task(self, request_id: str, _: object) -> None:
        del self._tasks[request_id]

    async def _hand_over(self, request: EngineRequest, stream: OutputStream) -> None:
        """Compute the prompt on one worker, and the answer on another."""
        prefill = min(self._prefill, key=lambda worker: worker.queued)
        with prefill.holding(len(request.token_ids)) as prompt:
            await prompt.turn()
            answered = await self._first_token(request, prefill, stream)
            prompt.computed()
            if answered is None:
                return
            decode = min(self._decode, key=lambda worker: worker.requests)
            with decode.serving(request) as served:
                await served.room()
                await self._pull(request, prefill, decode)
                prompt.release()
                await served.forward(msgspec.structs.replace(request, answered=answered), stream)

    async def _first_token(
        self, request: EngineRequest, prefill: "_PrefillQueue", stream: OutputStream
    ) -> list[int] | None:
        """Compute the prompt; send its first token on.

        Returns:
            The token; None if the answer has ended.
        """
        one = msgspec.structs.replace(request.sampling, max_tokens=1)
        first = msgspec.structs.replace(request, sampling=one)
        answered: list[int] = []
        with prefill.engine.submit(first) as outputs:
            async for output in outputs:
                answered += output.token_ids
                goes_on = output.finish_reason == "length" and request.sampling.max_tokens > 1
                if goes_on:
                    output = msgspec.structs.replace(output, finish_reason=None)
                stream.put(output)
                if goes_on:
                    return answered
        return None

    async def _pull(
        self, request: EngineRequest, prefill: "_PrefillQueue", decode: "_DecodeQueue"
    ) -> None:
        """Move a prompt's KV; what can't be moved is computed again."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            blob = await prefill.engine.export_kv(request.tenant, request.token_ids)
            await decode.engine.import_kv(request.tenant, blob)
        except KvTransferError as error:
            _log.warning("KV was not moved: %s", error)
            return
        self.transferred_bytes += len(blob)
        self.transfer_seconds += loop.time() - started


def hands_over(request: EngineRequest) -> bool:
    """Whether another engine can go on with an answer after its first token."""
    sampling = request.sampling
    whole = request.background or request.method is not None or request.empty_threshold > 0
    return not whole and sampling.n == 1 and sampling.prompt_logprobs is None


class _PrefillQueue:
    """A prefill worker and the prompts that wait for it, first come, first served."""

    def __init__(self, engine: WorkerEngine, limits: PrefillLimits) -> None:
        self.engine = engine
        self.limits = limits
        self.held = 0  # pages of prompts in flight, and of those that were not pulled
        self.waiting = deque[_HeldPrompt]()
        self.running = 0

    @property
    def queued(self) -> int:
        """Prompts that are not computed yet."""
        return len(self.waiting) + self.running

    def holding(self, tokens: int) -> "_HeldPrompt":
        """Return a prompt's place, to be entered."""
        return _HeldPrompt(self, tokens)

    def start(self) -> None:
        """Start the next batch if none runs."""
        if self.running:
            return
        prompts = [prompt.tokens for prompt in self.waiting]
        for _ in range(prefill_batch(self.limits, prompts, self.held)):
            self.waiting.popleft().start()


class _HeldPrompt:
    """A prompt's place at a prefill worker, from its arrival until its KV is pulled."""

    def __init__(self, queue: _PrefillQueue, tokens: int) -> None:
        self.tokens = tokens
        self._queue = queue
        self._pages = queue.limits.pool.pages_of(tokens)
        self._turn = asyncio.get_running_loop().create_future()
        self._runs = self._holds = False

    def __enter__(self) -> "_HeldPrompt":
        self._queue.waiting.append(self)
        self._queue.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._queue.waiting:
            self._queue.waiting.remove(self)
        self.computed()
        self.release()

    def start(self) -> None:
        """Give it its turn."""
        self._runs = self._holds = True
        self._queue.running += 1
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
            self._queue.running -= 1
            self._queue.start()

    def release(self) -> None:
        """Record that its KV was pulled, or is needed no more."""
        if self._holds:
            self._holds = False
            self._queue.held -= self._pages
            self._queue.start()


class _DecodeQueue:
    """A decode worker and its requests."""

    def __init__(self, engine: WorkerEngine, limits: DecodeLimits) -> None:
        self.engine = engine
        self.limits = limits
        self.requests = 0
        self.bridge = deque[_ServedRequest]()  # not yet pulled
        self.pulled = 0  # pages of prompts that were pulled and have no token yet
        self.running: set[_ServedRequest] = set()

    def serving(self, request: EngineRequest) -> "_ServedRequest":
        """Return a request's place, to be entered."""
        return _ServedRequest(self, len(request.token_ids))

    def start(self) -> None:
        """Let requests pull their KV, in order, as long as there is room."""
        pages_of = self.limits.pool.pages_of
        while self.bridge:
            first = self.bridge[0]
            used = sum(pages_of(one.tokens + 1) for one in self.running)
            free = self.limits.pool.pages - used - self.pulled
            idle = not self.running and not self.pulled
            if not idle and not self.limits.pulls(first.prompt, self.pulled, free):
                return
            self.bridge.popleft().pull()


class _ServedRequest:
    """A request's place at a decode worker."""

    def __init__(self, queue: _DecodeQueue, prompt: int) -> None:
        self.prompt = self.tokens = prompt
        self._queue = queue
        self._room = asyncio.get_running_loop().create_future()
        self._pulls = False

    def __enter__(self) -> "_ServedRequest":
        self._queue.requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        queue = self._queue
        queue.requests -= 1
        if self in queue.bridge:
            queue.bridge.remove(self)
        self._end_pull()
        queue.running.discard(self)
        queue.start()

    async def room(self) -> None:
        """Wait until the worker has room for the prompt's KV."""
        self._queue.bridge.append(self)
        self._queue.start()
        await self._room

    def pull(self) -> None:
        """Let it pull its KV."""
        self._pulls = True
        self._queue.pulled += self._queue.limits.pulled_pages(self.prompt)
        if not self._room.done():
            self._room.set_result(None)

    def _end_pull(self) -> None:
        if self._pulls:
            self._pulls = False
            self._queue.pulled -= self._queue.limits.pulled_pages(self.prompt)

    async def forward(self, request: EngineRequest, stream: OutputStream) -> None:
        """Have the worker answer, and put its outputs into a stream."""
        self.tokens = self.prompt + len(request.answered)
        with self._queue.engine.submit(request) as outputs:
            async for output in outputs:
                self._take(output, stream.put)

    def _take(self, output: EngineOutput, put: Callable[[EngineOutput], None]) -> None:
        if self not in self._queue.running:
            self._end_pull()
            self._queue.running.add(self)
            self._queue.start()
        self.tokens += len(output.token_ids)
        put(output)
