"""EngineClient: starts the engine process, sends it requests, restarts it when it dies or hangs."""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import structs

from midfill.config import (
    DEFAULT_MAX_QUEUED_TOKENS,
    DEFAULT_STEP_TIMEOUT,
    LogOptions,
    ModelOptions,
)
from midfill.engine import messages
from midfill.engine.process.outputs import OutputStream
from midfill.engine.process.supervision import (
    EngineProcess,
    RestartDelay,
    Watchdog,
    describe_exit,
)
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats, TenantStats
from midfill.engine.scheduling.admission import Admission
from midfill.errors import (
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    KvTransferError,
    MidfillError,
)
from midfill.kv.tiers.folders import MemoryFolder
from midfill.system.progress import Progress

_log = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "unresponsive", "restarting", "dead"]
_MAX_LOAD_SILENCE = 900.0  # seconds between two reports of a restarting engine
_MAX_RETRY_SECONDS = 10  # the first load may take far longer than later ones, which find its caches


class EngineClient:
    """The engine as the server sees it.

    An engine that dies is restarted for as long as the client is open, after a ``RestartDelay``.
    One that is silent for too long, at work or not, is ended, and so restarted. Requests in flight
    fail with EngineDeadError, and so do new ones until the engine is ready. The first start is not
    repeated: what fails then is an error of the checkpoint or the options.

    Attributes:
        state: "starting" before the engine was first ready, "ready", "unresponsive" while it takes
            requests but has said nothing for a while, "restarting" after it died, "dead" once the
            client is closed or the first start has failed.
        info: what the engine reported when it was last ready; None before.
        stats: the engine's numbers after its last step; before its first one, its empty pool.
        tenants: its numbers by tenant, of the last twentieth of a second or newer.
        restarts: how often the engine was restarted.
    """

    def __init__(
        self,
        path: Path,
        options: ModelOptions,
        on_progress: Progress | None = None,
        max_queued_tokens: int = DEFAULT_MAX_QUEUED_TOKENS,
        logs: LogOptions | None = None,
        step_timeout: float = DEFAULT_STEP_TIMEOUT,
        max_tenant_tokens: int | None = None,
        spawned: EngineProcess | None = None,
    ) -> None:
        """Prepare an engine; ``start`` starts it.

        Args:
            path: the checkpoint.
            options: how to run it.
            on_progress: called with (stage, done, total) during the first load.
            max_queued_tokens: maximum of ``queued_tokens``; beyond it ``submit`` refuses requests.
            max_tenant_tokens: the same of each tenant; None is half of it where others wait, too.
            logs: what the engine process logs, and how.
            step_timeout: seconds that a step may take; 0 lets it take for ever.
            spawned: the first process, if it was started ahead.
        """
        self.state: EngineState = "starting"
        self.info: messages.EngineInfo | None = None
        self.stats = EngineStats()
        self.tenants: dict[str, TenantStats] = {}
        self.restarts = 0
        self._start = messages.Start(str(path), options, logs or LogOptions())
        self._on_progress = on_progress
        self._admission = Admission(max_queued_tokens, max_tenant_tokens)
        self._step_timeout = step_timeout
        self._watchdog = Watchdog(step_timeout)
        self._load_watchdog = Watchdog(
            max(step_timeout, _MAX_LOAD_SILENCE), self._watchdog.tick_seconds
        )
        self._process: EngineProcess | None = None
        self._spawned = spawned
        self._answered = False  # whether the current process has produced any output
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, OutputStream] = {}
        self._first_start: asyncio.Future[messages.EngineInfo] | None = None
        self._memory_folder: MemoryFolder | None = None
        self._transfer_numbers = itertools.count()
        self._transfers: dict[str, asyncio.Future[messages.TransferDone]] = {}

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests without an output, background requests not counted."""
        return self._admission.queued_tokens

    @property
    def process_id(self) -> int | None:
        """The engine process's id, None while there is none."""
        return None if self._process is None else self._process.process_id

    @property
    def retry_after(self) -> int:
        """Seconds after which a request that failed for lack of an engine may succeed."""
        load_seconds = self.info.load_seconds if self.info is not None else 0.0
        return min(max(math.ceil(load_seconds), 1), _MAX_RETRY_SECONDS)

    async def start(self) -> messages.EngineInfo:
        """Start the engine and wait until it is ready.

        Raises:
            MidfillError: it can't start; the error that loading raised, or EngineDeadError.
        """
        self._give_memory_folder()
        self._first_start = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        return await self._first_start

    async def close(self) -> None:
        """End the engine."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._memory_folder is not None:
            self._memory_folder.remove()

    def _give_memory_folder(self) -> None:
        """Make the folder of the warm tier in memory, which outlives engine processes.

        Raises:
            MidfillError: there is no room for it.
        """
        options = self._start.options
        if not options.warm_tier.memory or options.warm_tier.memory_folder is not None:
            return
        self._memory_folder = MemoryFolder(options.warm_tier.memory)
        tier = structs.replace(options.warm_tier, memory_folder=str(self._memory_folder.path))
        self._start = structs.replace(self._start, options=structs.replace(options, warm_tier=tier))

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Queue requests, all or none; the stream yields their outputs.

        They are of one tenant and have one deadline. They are refused while too many tokens are
        queued, unless nothing else is queued.

        Raises:
            EngineDeadError: the engine is not ready.
            QueueFullError: too many tokens are queued, or too many for the deadline.
        """
        process = self._running_process()
        now = time.monotonic()
        asking = [request for request in requests if request.is_awaited]
        if asking:
            tokens = sum(len(request.token_ids) for request in asking)
            first = asking[0]
            self._admission.check(first.tenant, tokens, first.deadline, now, first.document)
        process.send(*map(messages.Submit, requests))
        stream = OutputStream(self, requests)
        for request in requests:
            self._streams[request.request_id] = stream
        self._admission.add(asking, now)
        return stream

    def check_admission(self, tenant: str, deadline: float | None, document: str = "") -> None:
        """Refuse a request of which only its tenant, deadline and document are known.

        Args:
            tenant: whose it is.
            deadline: when its client gives up; None is never.
            document: the planner's id of its document, or ``admission.NEW_DOCUMENT``; "" where it
                has none, or isn't known yet.

        Raises:
            QueueFullError: ``submit`` would refuse it, whatever its prompt.
        """
        self._admission.check(tenant, 0, deadline, time.monotonic(), document)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Have the engine end a request, or one of its answers, if it is unfinished."""
        if request_id in self._streams and self._is_up and self._process is not None:
            self._process.send(messages.Cancel(request_id, index))

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool, 0 before the engine was ready."""
        return 0 if self.info is None else self.info.kv_bytes

    @property
    def _is_up(self) -> bool:
        """Whether the engine takes requests."""
        return self.state in ("ready", "unresponsive")

    def _running_process(self) -> EngineProcess:
        """Return the process.

        Raises:
            EngineDeadError: the engine is not ready.
        """
        if not self._is_up or self._process is None:
            raise self._not_ready()
        return self._process

    def forget(self, request_id: str) -> None:
        """Route no more outputs of a request."""
        self._streams.pop(request_id, None)
        self._admission.remove(request_id)

    # --- KV in the engine's cache ---

    async def cached_tokens(self, tenant: str, token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's tokens are cached, from the first on.

        Raises:
            EngineDeadError: the engine is not ready, or died.
        """
        tokens = list(token_ids)
        return (await self._transfer(lambda number: messages.FindKv(number, tenant, tokens))).tokens

    async def export_kv(self, tenant: str, token_ids: Sequence[int], start: int = 0) -> memoryview:
        """Return an encoded ``KvBlob`` of what is cached of a prompt's first tokens.

        Without the first ``start``, which the receiver has.

        Raises:
            EngineDeadError: the engine is not ready, or died.
            KvTransferError: nothing of it is cached, or nothing after ``start``.
        """
        tokens = list(token_ids)
        return (
            await self._transfer(lambda number: messages.ExportKv(number, tenant, tokens, start))
        ).blob

    async def import_kv(
        self, tenant: str, blob: bytes | memoryview, before: Sequence[int] = ()
    ) -> int:
        """Put an encoded ``KvBlob`` into a tenant's prefix cache.

        A prompt that is submitted meanwhile and begins with its tokens waits for them. ``before``
        are the tokens that an export has left out.

        Returns:
            How many tokens are cached then, from the first on, those before included.

        Raises:
            EngineDeadError: the engine is not ready, or died.
            KvTransferError: the blob is damaged, or of another model or tenant.
        """
        tokens, view = list(before), memoryview(blob)
        return (
            await self._transfer(lambda number: messages.ImportKv(number, tenant, view, tokens))
        ).tokens

    async def _transfer(self, message: Callable[[str], messages.ToEngine]) -> messages.TransferDone:
        """Send a message with a new transfer's id; return its answer. A cancelled one is ended."""
        process = self._running_process()
        transfer_id = f"kv-transfer-{next(self._transfer_numbers)}"
        result: asyncio.Future[messages.TransferDone] = asyncio.get_running_loop().create_future()
        self._transfers[transfer_id] = result
        process.send(message(transfer_id))
        try:
            return await result
        except asyncio.CancelledError:
            self._transfers.pop(transfer_id, None)
            if self._is_up and self._process is process:
                process.send(messages.EndTransfer(transfer_id))
            raise

    def _end_transfer(self, transfer_id: str, answer: messages.TransferDone | MidfillError) -> None:
        """Give a transfer its answer, or the error it ends with; ignored if nobody awaits it."""
        future = self._transfers.pop(transfer_id, None)
        if future is None or future.done():
            return
        if isinstance(answer, MidfillError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    # --- the process's life ---

    async def _supervise(self) -> None:
        """Run one engine process after the other, until the first start fails or for ever."""
        delays = RestartDelay()
        try:
            while True:
                await self._run_process()
                if self.info is None:
                    return
                delay = delays.after_end(self._answered)
                _log.error("restarting the engine %s", f"in {delay:g} s" if delay else "now")
                await asyncio.sleep(delay)
                self.restarts += 1
        finally:
            self.state = "dead"
            self._fail_all("the engine was stopped")

    async def _run_process(self) -> None:
        """Run one engine process to its end, whatever ends it."""
        self._answered = False
        process: EngineProcess | None = None
        watch: asyncio.Task[None] | None = None
        reason = "the engine was stopped"
        try:
            process = self._process = self._spawned or EngineProcess.spawn()
            self._spawned = None
            process.send(self._start)
            if self._step_timeout:
                watch = asyncio.create_task(self._watch(process), name="engine watchdog")
            async with contextlib.aclosing(process.received()) as received:
                async for message in received:
                    self._hear()
                    self._handle(message)
            reason = f"the engine process ended ({describe_exit(process.exit_status)})"
            if self.info is not None:
                _log.error("%s", reason)
        except Exception as error:  # a bug or a lack of resources: neither may end the restarts
            reason = f"the engine process could not be used ({error!r})"
            _log.exception("the engine process could not be used")
        finally:
            if watch is not None:
                watch.cancel()
            self._process = None
            self.state = "starting" if self.info is None else "restarting"
            self._fail_all(reason)
            if process is not None:
                await process.close()

    def _hear(self) -> None:
        """Note that the engine has sent something."""
        self._watchdog.hear()
        self._load_watchdog.hear()
        if self.state == "unresponsive":
            self.state = "ready"

    async def _watch(self, process: EngineProcess) -> None:
        """End the process if it hangs: at work, idle, or loading again."""
        self._hear()
        while True:
            await asyncio.sleep(self._watchdog.tick_seconds)
            watchdog = self._watchdog
            if self._is_up:
                process.send(messages.Ping())
            elif self.info is None:
                continue  # the first load may compile kernels, which takes what it takes
            else:
                watchdog = self._load_watchdog
            if watchdog.tick():
                text = "has taken no step for %g s (--step-timeout)"
                if not self._is_up:
                    text = "has said nothing for %g s while loading"
                _log.error(f"the engine {text}; ending it", watchdog.seconds)
                await process.abort()
                return
            if self.state == "ready" and watchdog.late:
                self.state = "unresponsive"

    def _handle(self, message: messages.FromEngine) -> None:
        """Act on a message of the engine."""
        match message:
            case messages.StepReport(outputs, stats, tenants):
                self.stats = stats
                if tenants is not None:
                    self.tenants = tenants
                for output in outputs:
                    self._route(output)
            case messages.Rejected(request_id, text, param, code):
                self._fail(request_id, InvalidRequestError(text, param=param, code=code))
            case messages.TransferDone():
                self._end_transfer(message.transfer_id, message)
            case messages.TransferRefused(transfer_id, text):
                self._end_transfer(transfer_id, KvTransferError(text))
            case messages.RequestFailed(request_id, text):
                self._end_transfer(request_id, KvTransferError(text))
                self._fail(request_id, GenerationError(text))
            case messages.Pong():
                pass
            case messages.Loading(stage, done, total):
                if self._on_progress is not None and self.info is None:
                    self._on_progress(stage, done, total)
            case messages.Ready(info):
                if self.info is not None:
                    _log.warning("the engine is ready again")
                self.state, self.info = "ready", info
                self.stats = EngineStats(slots_total=info.slots, slots_free=info.slots)
                self._admission.work.slots = info.slots
                if self._first_start is not None and not self._first_start.done():
                    self._first_start.set_result(info)
            case messages.Failed():
                if self.info is not None:
                    _log.error("the engine can't restart: %s", message.message)
                self._fail_first_start(message.as_error("the engine can't start: "))

    def _route(self, output: EngineOutput) -> None:
        self._answered = True
        self._admission.record(output, time.monotonic())
        stream = self._streams.get(output.request_id)
        if stream is not None:  # otherwise it was cancelled while the output was on its way
            stream.put(output)

    def _not_ready(self) -> EngineDeadError:
        if self.state == "dead":
            return EngineDeadError("the engine was stopped")
        return EngineDeadError(
            f"the engine is {self.state}; try again in a moment", retry_after=self.retry_after
        )

    # --- failures ---

    def _fail(self, request_id: str, error: MidfillError) -> None:
        """End the stream of one request."""
        stream = self._streams.get(request_id)
        self.forget(request_id)
        if stream is not None:
            stream.put(error)

    def _fail_all(self, reason: str) -> None:
        """End whatever waits for the process that has ended."""
        self.stats, self.tenants = EngineStats(), {}
        self._fail_first_start(EngineDeadError(reason))
        streams, self._streams = self._streams, {}
        self._admission.clear()
        error = EngineDeadError(f"{reason} while this request was in flight")
        if self.state == "restarting":
            error = EngineDeadError(
                f"{error}; it is being restarted, try again in a moment",
                retry_after=self.retry_after,
            )
        for transfer_id in list(self._transfers):
            self._end_transfer(transfer_id, error)
        for stream in set(streams.values()):
            stream.put(error)

    def _fail_first_start(self, error: MidfillError) -> None:
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_exception(error)
