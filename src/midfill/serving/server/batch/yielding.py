"""YieldingEngine: an engine for batches, which gives way whenever somebody waits for an answer.

A batch has until tomorrow, a keystroke 100 ms. So rows run only while no other request has for a
moment: the next keystroke mostly comes soon, and what the engine prepares for it in idle time comes
before a batch, too. When a request arrives, the rows in progress leave the engine within one step.
What they have computed stays cached, and what they have generated is kept: they go on after it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from msgspec import structs

from midfill.engine.messages import EngineInfo
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats, TenantStats
from midfill.errors import MidfillError
from midfill.serving.server.served_engine import ServedEngine

QUIET_SECONDS = 2.0
"""Time without other requests before rows run: longer than between two keystrokes, mostly."""

_REPORT_SECONDS = 0.25  # what a row may have to generate again when it gave way


class InteractiveLoad:
    """Whether somebody waits for an answer, or did a moment ago.

    Args:
        quiet_seconds: how long a moment is.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        quiet_seconds: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._running = 0
        self._last = -quiet_seconds + clock()
        self._changed = asyncio.Event()
        self.on_busy: set[Callable[[], None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for an answer now."""
        return self._running > 0

    def record(self, running: int) -> None:
        """Note how many requests generate now."""
        began = running > 0 and not self._running
        self._running, self._last = running, self._clock()
        self._changed.set()
        if began:
            for callback in tuple(self.on_busy):
                callback()

    async def idle(self) -> None:
        """Return once nobody waits, and nobody did for a moment."""
        while True:
            seconds = self._last + self._quiet_seconds - self._clock()
            if not self._running and seconds <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._running else seconds):
                    await self._changed.wait()


class YieldingEngine:
    """See the module. Requests for several answers, or for the prompt's scores, run to their end.

    Args:
        engine: runs the requests.
        load: says when they may run.
    """

    def __init__(self, engine: ServedEngine, load: InteractiveLoad) -> None:
        self._engine = engine
        self._load = load
        self._runs: dict[str, _Run] = {}

    @property
    def state(self) -> str:
        """See ``ServedEngine``, for this and all below."""
        return self._engine.state

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def tenants(self) -> Mapping[str, TenantStats]:
        return self._engine.tenants

    @property
    def restarts(self) -> int:
        return self._engine.restarts

    @property
    def queued_tokens(self) -> int:
        return self._engine.queued_tokens

    @property
    def retry_after(self) -> int:
        return self._engine.retry_after

    def check_admission(self, tenant: str, deadline: float | None, document: str = "") -> None:
        """Refuse nothing: rows wait."""

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Queue requests until they may run."""
        stream = OutputStream(self, requests)
        run = _Run(self._engine, self._load, stream, requests)
        for request in requests:
            self._runs[request.request_id] = run
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers."""
        run = self._runs.get(request_id)
        if run is not None:
            run.cancel(request_id, index)

    def forget(self, request_id: str) -> None:
        """Route no more outputs of a request."""
        self._runs.pop(request_id, None)


class _Run:
    """Requests that were submitted together."""

    def __init__(
        self,
        engine: ServedEngine,
        load: InteractiveLoad,
        stream: OutputStream,
        requests: tuple[EngineRequest, ...],
    ) -> None:
        self._engine = engine
        self._load = load
        self._stream = stream
        self._inner: OutputStream | None = None
        self._left = {
            request.request_id: structs.replace(
                request,
                stream_interval=min(request.stream_interval, _REPORT_SECONDS),
                deadline=None,
            )
            for request in requests
        }
        self._first: dict[str, EngineOutput] = {}
        self._gives_way = all(
            request.sampling.n == 1 and request.sampling.prompt_logprobs is None
            for request in requests
        )
        self._task = asyncio.create_task(self._run(), name="rows of a batch")

    def cancel(self, request_id: str, index: int | None) -> None:
        """End a request, or one of its answers; without any left, all ends."""
        if self._inner is not None:
            self._inner.cancel(request_id, index)
        request = self._left.get(request_id)
        if index is None or (request is not None and request.sampling.n == 1):
            self._left.pop(request_id, None)
        if not self._left:
            self._task.cancel()

    async def _run(self) -> None:
        """Have the requests answered, in as many pieces as it takes."""
        try:
            while self._left:
                await self._load.idle()
                await self._run_while_idle()
        except MidfillError as error:
            self._stream.put(error)

    async def _run_while_idle(self) -> None:
        with self._engine.submit(*self._left.values()) as inner:
            self._inner = inner
            if self._gives_way:
                self._load.on_busy.add(inner.end)
            try:
                async for output in inner:
                    self._take(output)
                if not self._gives_way:
                    self._left.clear()
            finally:
                self._load.on_busy.discard(inner.end)
                self._inner = None

    def _take(self, output: EngineOutput) -> None:
        """Pass an output on, and remember what a request has generated."""
        request_id = output.request_id
        request = self._left.get(request_id)
        if request is None:
            return
        if self._gives_way:
            first = self._first.setdefault(request_id, output)
            if first is not output:  # it may be the first one after a pause
                output = structs.replace(
                    output,
                    cached_tokens=first.cached_tokens,
                    reused_tokens=first.reused_tokens,
                    empty_probability=first.empty_probability,
                    prefill_seconds=None,
                )
            answered = [*request.answered, *output.token_ids]
            self._left[request_id] = structs.replace(request, answered=answered)
            if output.finish_reason is not None:
                del self._left[request_id]
        self._stream.put(output)
