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
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from midfill.config import DEFAULT_MAX_QUEUED_TOKENS
from midfill.engine.disaggregated.known_tokens import KnownTokens
from midfill.engine.disaggregated.shared_answer import SharedAnswer, hands_over
from midfill.engine.disaggregated.worker_queues import (
    DecodeQueue,
    PrefillQueue,
    WorkerEngine,
    WorkerQueue,
)
from midfill.engine.disaggregated.workers import DecodeLimits, PrefillLimits
from midfill.engine.process.output_stream import OutputStream
from midfill.engine.request import EngineRequest
from midfill.engine.routing import choose, request_key
from midfill.engine.scheduling.admission import Admission
from midfill.errors import (
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    KvTransferError,
    MidfillError,
)

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3  # at a request whose workers die: it may be what kills them

_ASKED_TOKENS = 256  # of a prompt; less KV moves sooner than is found out what is there

W = TypeVar("W", bound=WorkerQueue)


class _ExpiredError(Exception):
    """Nobody waits for the request any more."""


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
            EngineDeadError: no worker is ready.
            QueueFullError: too many tokens are queued, or too many for the deadline.
        """
        for request in requests:
            self._check(request)
        if not self._any_usable:
            raise self._not_ready()
        now = time.monotonic()
        asking = [request for request in requests if not request.background]
        if asking:
            tokens = sum(len(request.token_ids) for request in asking)
            first = asking[0]
            self._admission.check(first.tenant, tokens, first.deadline, now, first.document)
        self._admission.add(asking, now)
        stream = OutputStream(self, requests)
        for request in requests:
            answer = SharedAnswer(request, stream, self._admission, self._context)
            task = asyncio.create_task(self._answer(answer, stream), name="disaggregated request")
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
        document = request_key(request.tenant, request.document, request.token_ids)
        return choose(document, self._usable(workers))

    def _not_ready(self) -> EngineDeadError:
        workers: list[WorkerQueue] = [*self._prefill, *self._decode]
        return EngineDeadError(
            "no worker is ready; try again in a moment",
            retry_after=min(worker.engine.retry_after for worker in workers),
        )

    # --- a request ---

    async def _answer(self, answer: SharedAnswer, stream: OutputStream) -> None:
        """Answer a request; errors go to the stream."""
        try:
            await self._answer_somewhere(answer)
        except _ExpiredError:
            answer.end("expired")
        except EngineDeadError as error:
            if answer.request.background:
                answer.end("cancelled")
            else:
                stream.put(error)
        except MidfillError as error:
            stream.put(error)
        except Exception:
            _log.exception("a request failed between workers")
            stream.put(GenerationError("the workers failed on this request; the log says why"))

    def _forget_task(self, request_id: str, _: object) -> None:
        del self._tasks[request_id]
        self._admission.remove(request_id)

    async def _answer_somewhere(self, answer: SharedAnswer) -> None:
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

    async def _attempt(self, answer: SharedAnswer) -> None:
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

    async def _hand_over(self, answer: SharedAnswer, prefill: PrefillQueue) -> None:
        """Compute the prompt on one worker, and the answer on another."""
        request = answer.request
        with prefill.holding(len(request.token_ids)) as prompt, self._asking(request) as known:
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
                start = await known.of(decode)
                await self._pull(request, prefill, decode, start, prompt.computed)
                prompt.release()
                served.tokens += len(answer.tokens)
                with decode.engine.submit(answer.rest()) as outputs:
                    async for output in outputs:
                        served.decoded(len(output.token_ids))
                        answer.put(output)

    async def _forward(self, answer: SharedAnswer, worker: WorkerQueue) -> None:
        """Have one worker answer what is left."""
        with worker.engine.submit(answer.rest()) as outputs:
            async for output in outputs:
                answer.put(output)

    async def _first_tokens(self, answer: SharedAnswer, prefill: PrefillQueue) -> bool:
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

    def _asking(self, request: EngineRequest) -> KnownTokens:
        """Ask how much of a long prompt's KV its decode worker has, while it is computed."""
        is_long = len(request.token_ids) >= _ASKED_TOKENS
        return KnownTokens(self._choose(self._decode, request) if is_long else None, request)

    async def _wait(self, answer: SharedAnswer, event: Awaitable[None]) -> None:
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
