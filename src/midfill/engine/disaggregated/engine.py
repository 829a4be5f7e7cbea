"""DisaggregatedEngine: prompts are computed by some engine processes, answers by others.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670). The way of a request:

1. It goes to the prefill worker that holds its document's KV, or to another if that one has too
   much to do. The worker computes the prompt and samples the first token, which is sent on at once.
2. A decode worker pulls the prompt's KV as soon as it has room. Until it has confirmed that, the
   prompt counts as held by the prefill worker, which takes no further ones where its pool is full:
   that pool is the buffer. A worker copies KV between its steps, so a prefill worker that takes
   one batch after the other copies before the next one.
3. The decode worker goes on with the answer after its first token. Seed, penalties and what the
   answer has to begin with go with it (``EngineRequest.answered``), so the tokens are those of one
   engine.

What the decode worker has of a prompt since it answered an older one of the same document is not
moved. KV that can't be moved, or is evicted on the way, is computed again: a transfer changes
times, never answers. What belongs to more than tokens and KV (``hands_over``) stays on its prefill
worker from its beginning to its end, and so do prompts that are computed in idle time.

A worker that dies or hangs takes no answer with it that can be handed over: another one goes on
after the tokens that were sent. Where all workers of a kind are down, those of the other kind do
their work, too.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from midfill.config import DEFAULT_MAX_QUEUED_TOKENS
from midfill.engine.disaggregated.worker_queues import (
    DecodeQueue,
    PrefillQueue,
    WorkerEngine,
    WorkerQueue,
)
from midfill.engine.disaggregated.workers import DecodeLimits, PrefillLimits
from midfill.engine.process.aggregate import RequestTasks
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, FinishReason
from midfill.engine.routing import choose, request_key
from midfill.engine.scheduling.admission import Admission
from midfill.errors import (
    EngineDeadError,
    InvalidRequestError,
    KvTransferError,
)

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3  # at a request whose workers die: it may be what kills them

_ASKED_TOKENS = 256  # of a prompt; less KV moves sooner than is found out what is there

W = TypeVar("W", bound=WorkerQueue)


class _ExpiredError(Exception):
    """Nobody waits for the request any more."""


def hands_over(request: EngineRequest) -> bool:
    """Whether another engine can go on with an answer after its first tokens.

    Not with what more than tokens and KV belongs to: several answers, scores of the prompt, KV
    under a method.
    """
    sampling = request.sampling
    plain = not request.background and request.method in (None, "none")
    return plain and sampling.n == 1 and sampling.prompt_logprobs is None


class RequestState:
    """A request that several engines have a part in, and what its client has of the answer.

    Args:
        request: the request.
        stream: where outputs go.
        admission: counts the request as queued until its first output.
        context: maximum tokens of a prompt and its answer.

    Attributes:
        tokens: of the answer, as far as they were sent.
        begun: whether anything was.
    """

    def __init__(
        self, request: EngineRequest, stream: OutputStream, admission: Admission, context: int
    ) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.begun = False
        self._stream = stream
        self._admission = admission
        self._first: EngineOutput | None = None
        self._room = min(request.sampling.max_tokens, context - len(request.token_ids))

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can serve what is left."""
        return not self.begun or hands_over(self.request)

    @property
    def deadline(self) -> float | None:
        """When the client gives up on what comes next; None is never."""
        whole = self.request.stream_interval == math.inf
        return self.request.deadline if whole or not self.begun else None

    def first_part(self) -> EngineRequest:
        """Return the request to an engine that computes the prompt and hands over the answer.

        The answer's first token; or, where it has to be found out first whether the answer is empty
        after the bytes it has to begin with, as many as these bytes may be.
        """
        request = self.request
        tokens = 1 + (len(request.begins_with) if request.empty_threshold > 0 else 0)
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=min(tokens, request.sampling.max_tokens)
        )
        return msgspec.structs.replace(request, sampling=sampling, stream_interval=0.0)

    def rest(self) -> EngineRequest:
        """Return the request to an engine that goes on where the answer stands."""
        return msgspec.structs.replace(self.request, answered=self.tokens, deadline=self.deadline)

    def put_first(self, output: EngineOutput) -> bool:
        """Send on the first output to ``first_part``; return whether the answer goes on."""
        goes_on = output.finish_reason is None or (
            output.finish_reason == "length" and len(output.token_ids) < self._room
        )
        self.put(msgspec.structs.replace(output, finish_reason=None) if goes_on else output)
        return goes_on

    def put(self, output: EngineOutput) -> None:
        """Send an output on; what it says of the prompt is what its first engine has found."""
        self._admission.record(output, time.monotonic())
        if hands_over(self.request):
            first = self._first = self._first or output
            if output is not first:
                output = msgspec.structs.replace(
                    output,
                    cached_tokens=first.cached_tokens,
                    reused_tokens=first.reused_tokens,
                    prefill_seconds=None,
                )
            self.tokens += output.token_ids
        self.begun = True
        self._stream.put(output)

    def end(self, reason: FinishReason) -> None:
        """End all answers, whatever is missing of them."""
        for index in range(self.request.sampling.n):
            self._stream.put(
                EngineOutput(
                    request_id=self.request.request_id,
                    index=index,
                    token_ids=[],
                    finish_reason=reason,
                )
            )


class DisaggregatedEngine:
    """Answers requests with workers that have started.

    Args:
        prefill: engines of prefill workers, and their limits.
        decode: engines of decode workers, and their limits.
        admission: which requests may be queued; None is as in an engine with default options.
        context: maximum tokens of a prompt and its answer.

    Attributes:
        transferred_bytes: of KV, since the start.
        transfer_seconds: that it took, from the first byte's export to the confirmation.
        resumed: requests that went on at another worker after one was lost.
        waiting: answers that wait for their turn or for room, by tenant.

    Raises:
        InvalidRequestError: one of the two kinds is missing.
    """

    def __init__(
        self,
        prefill: Sequence[tuple[WorkerEngine, PrefillLimits]],
        decode: Sequence[tuple[WorkerEngine, DecodeLimits]],
        admission: Admission | None = None,
        context: int = 2**31,
    ) -> None:
        for kind, workers in (("prefill", prefill), ("decode", decode)):
            if not workers:
                raise InvalidRequestError(f"there is no {kind} worker; at least one is needed")
        self.transferred_bytes = 0
        self.transfer_seconds = 0.0
        self.resumed = 0
        self.waiting = Counter[str]()
        self._admission = admission or Admission(DEFAULT_MAX_QUEUED_TOKENS)
        self._context = context
        self._prefill = [
            PrefillQueue(f"prefill {number}", *worker) for number, worker in enumerate(prefill)
        ]
        self._decode = [
            DecodeQueue(f"decode {number}", *worker) for number, worker in enumerate(decode)
        ]
        failure = "the workers failed on this request; the log says why"
        self._tasks = RequestTasks(self._answer, failure, self._admission.remove)

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
            EngineDeadError: no worker is ready.
            QueueFullError: too many tokens are queued, or too many for the deadline.
        """
        for request in requests:
            self._check(request)
        if not self._any_usable:
            raise self._not_ready()
        now = time.monotonic()
        asking = [request for request in requests if request.is_awaited]
        if asking:
            tokens = sum(len(request.token_ids) for request in asking)
            first = asking[0]
            self._admission.check(first.tenant, tokens, first.deadline, now, first.document)
        self._admission.add(asking, now)
        return self._tasks.start(requests)

    async def close(self) -> None:
        """End all requests."""
        await self._tasks.close()

    def _check(self, request: EngineRequest) -> None:
        """Refuse a request that no worker could ever serve.

        Raises:
            InvalidRequestError: its prompt is too long.
        """
        tokens = len(request.token_ids)
        fits = all(worker.limits.admits(tokens) for worker in self._prefill)
        if request.background:
            return  # a worker drops it where it does not fit
        if not fits or not all(worker.limits.admits(tokens + 2) for worker in self._decode):
            raise InvalidRequestError(
                f"the prompt has {tokens} tokens, which is too long for the workers' KV memory",
                param="prompt",
                code="context_length_exceeded",
            )

    # --- which worker ---

    def _usable(self, workers: Sequence[W]) -> list[W]:
        """Return the workers that take requests; slow ones only where there are no others."""
        ready = [worker for worker in workers if worker.engine.state == "ready"]
        return ready or [worker for worker in workers if worker.engine.state == "unresponsive"]

    @property
    def _any_usable(self) -> bool:
        return bool(self._usable(self._prefill) or self._usable(self._decode))

    def _choose(self, workers: Sequence[W], request: EngineRequest) -> W | None:
        """Return the worker for a request, if possible the one that knows its document."""
        document = request_key(
            request.tenant, request.document, request.token_ids, request.hints.program
        )
        return choose(document, self._usable(workers))

    def _not_ready(self) -> EngineDeadError:
        workers: list[WorkerQueue] = [*self._prefill, *self._decode]
        return EngineDeadError(
            "no worker is ready; try again in a moment",
            retry_after=min(worker.engine.retry_after for worker in workers),
        )

    # --- a request ---

    async def _answer(self, request: EngineRequest, stream: OutputStream) -> None:
        """Answer a request."""
        answer = RequestState(request, stream, self._admission, self._context)
        try:
            await self._answer_somewhere(answer)
        except _ExpiredError:
            answer.end("expired")
        except EngineDeadError:
            if not request.background:
                raise
            answer.end("cancelled")

    async def _answer_somewhere(self, answer: RequestState) -> None:
        """Answer a request, with other workers where some die.

        Raises:
            MidfillError: it can't be answered, or not now.
        """
        for left in reversed(range(_MAX_ATTEMPTS)):
            try:
                await self._attempt(answer)
                return
            except EngineDeadError as error:
                retries = answer.can_go_on and not answer.request.background
                if not left or not retries or not self._any_usable:
                    raise
                _log.warning("%s; another worker goes on with it", error)
                self.resumed += 1

    async def _attempt(self, answer: RequestState) -> None:
        """Answer what is left of a request with the workers of now.

        Raises:
            MidfillError: it can't be answered, or a worker died.
        """
        request = answer.request
        prefill = self._choose(self._prefill, request)
        decode = self._choose(self._decode, request)
        worker: WorkerQueue | None
        if not hands_over(request):
            worker = prefill or decode
        elif answer.tokens:
            worker = decode or prefill
        elif prefill is not None:
            await self._hand_over(answer, prefill)
            return
        else:
            worker = decode
        if worker is None:
            raise self._not_ready()
        with worker.whole():
            await self._forward(answer, worker)

    async def _hand_over(self, answer: RequestState, prefill: PrefillQueue) -> None:
        """Compute the prompt on one worker, and the answer on another."""
        request = answer.request
        with (
            prefill.holding(len(request.token_ids)) as prompt,
            self._asking(request) as cached_tokens,
        ):
            await self._wait(answer, prompt.turn())
            if not await self._first_tokens(answer, prefill):
                return
            decode = self._choose(self._decode, request)
            if decode is None:
                prompt.computed()
                with prefill.whole():
                    await self._forward(answer, prefill)
                return
            with decode.serving(request) as served:
                if not served.has_room():
                    prompt.computed()  # and the next one starts
                    await self._wait(answer, served.room)
                start = await cached_tokens(decode)
                await self._pull(request, prefill, decode, start, prompt.computed)
                prompt.release()
                served.tokens += len(answer.tokens)
                with decode.engine.submit(answer.rest()) as outputs:
                    async for output in outputs:
                        served.decoded(len(output.token_ids))
                        answer.put(output)

    async def _forward(self, answer: RequestState, worker: WorkerQueue) -> None:
        """Have one worker answer what is left."""
        with worker.engine.submit(answer.rest()) as outputs:
            async for output in outputs:
                answer.put(output)

    async def _first_tokens(self, answer: RequestState, prefill: PrefillQueue) -> bool:
        """Compute the prompt; send the first token on, or the first ones.

        Returns:
            Whether the answer goes on.
        """
        with prefill.engine.submit(answer.first_part()) as outputs:
            async for output in outputs:
                return answer.put_first(output)
        raise EngineDeadError("the worker's answer ended too early", retry_after=1)

    async def _pull(
        self,
        request: EngineRequest,
        prefill: PrefillQueue,
        decode: DecodeQueue,
        start: int,
        on_export: Callable[[], None],
    ) -> None:
        """Move a prompt's KV; what can't be moved is computed again.

        Before the prefill worker's next prompt: else the KV would wait for that.

        Args:
            request: whose KV it is.
            prefill, decode: from which worker to which.
            start: how many of the prompt's tokens the decode worker has.
            on_export: called when the prefill worker has done its part.

        Raises:
            EngineDeadError: the decode worker died.
        """
        if start >= len(request.token_ids):
            on_export()
            return
        loop = asyncio.get_running_loop()
        started = loop.time()
        before = request.token_ids[:start]
        try:
            blob = await prefill.engine.export_kv(request.tenant, request.token_ids, start)
        except (KvTransferError, EngineDeadError) as error:
            _log.warning("KV was not moved: %s", error)
            return
        finally:
            on_export()
        try:
            tokens = await decode.engine.import_kv(request.tenant, blob, before)
        except KvTransferError as error:
            _log.warning("KV was not moved: %s", error)
            return
        self.transferred_bytes += len(blob)
        self.transfer_seconds += loop.time() - started
        if tokens < start:  # what was there has been evicted meanwhile
            await self._pull(request, prefill, decode, 0, on_export)

    @contextlib.contextmanager
    def _asking(self, request: EngineRequest) -> Iterator[Callable[[DecodeQueue], Awaitable[int]]]:
        """Ask how much of a long prompt's KV its decode worker has, while it is computed.

        Yields a function that returns how many tokens a worker has; 0 if it was not asked, or died.
        """
        is_long = len(request.token_ids) >= _ASKED_TOKENS
        worker = self._choose(self._decode, request) if is_long else None
        task: asyncio.Task[int] | None = None
        if worker is not None:
            asked = worker.engine.cached_tokens(request.tenant, request.token_ids)
            task = asyncio.create_task(asked, name="asking for cached tokens")
            task.add_done_callback(lambda task: task.cancelled() or task.exception())

        async def cached_tokens(decode: DecodeQueue) -> int:
            if task is None or decode is not worker:
                return 0
            try:
                return await task
            except EngineDeadError:
                return 0

        try:
            yield cached_tokens
        finally:
            if task is not None:
                task.cancel()

    async def _wait(self, answer: RequestState, event: Awaitable[None]) -> None:
        """Wait for a turn or for room, as long as anybody waits for the answer.

        Raises:
            _ExpiredError: nobody does any more.
        """
        tenant, deadline = answer.request.tenant, answer.deadline
        self.waiting[tenant] += 1
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await event
        except TimeoutError:
            raise _ExpiredError from None
        finally:
            self.waiting[tenant] -= 1
