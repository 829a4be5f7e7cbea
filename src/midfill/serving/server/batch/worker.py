"""BatchWorker: answers the stored batches of a server: one at a time of each tenant."""

import asyncio
import contextlib
import logging
from functools import partial
from pathlib import Path

from midfill.errors import MidfillError
from midfill.serving.server.batch.api import InProcessApi, RowService
from midfill.serving.server.batch.job import (
    Answered,
    BatchJob,
    BatchProgress,
    PlannedPrompt,
)
from midfill.serving.server.batch.results import ResultFile
from midfill.serving.server.batch.row_budget import RowBudget
from midfill.serving.server.batch.rows import RowFile
from midfill.serving.server.batch.store import (
    BatchFault,
    BatchFaults,
    BatchObject,
    BatchStore,
    FileObject,
    RequestCounts,
    TenantBatches,
    split_results,
)

_log = logging.getLogger(__name__)
_POOL_SHARE = 0.5  # of the KV pool, at most; the rest keeps documents
_MAX_ROWS = 8
"""Rows in progress. A request may come amid a step, which takes longer with each answer in it."""

_MAX_BATCHES = 4  # in progress at a time: each holds its prompts in memory
_TRY_AGAIN_SECONDS = 30.0  # where the disk is full


class _PatientApi:
    """Plans rows while nobody waits for an answer: that takes processor time, too."""

    def __init__(self, api: InProcessApi, idle: asyncio.Event) -> None:
        self._api = api
        self._idle = idle

    async def plan(self, url: str, body: bytes) -> PlannedPrompt | Answered:
        """See ``RowApi``."""
        await self._idle.wait()
        return await self._api.plan(url, body)

    async def answer(self, url: str, body: bytes) -> Answered:
        """See ``RowApi``; the engine waits."""
        return await self._api.answer(url, body)


class BatchWorker:
    """See the module. Tenants take turns row by row; where they are too many, batch by batch, too.

    Args:
        store: the batches.
        service: answers rows.
        idle: set while nobody waits for another answer.
        slots: size of the KV pool in tokens.
    """

    def __init__(
        self, store: BatchStore, service: RowService, idle: asyncio.Event, slots: int
    ) -> None:
        self.store = store
        self._service = service
        self._idle = idle
        self._budget = RowBudget(int(_POOL_SHARE * slots), _MAX_ROWS)
        self._wake = asyncio.Event()
        self._turns: dict[str, int] = {}
        self._turn = 0
        self._tenants: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, asyncio.Task[BatchProgress]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer batches."""
        self._task = asyncio.create_task(self._run(), name="batches")

    async def close(self) -> None:
        """Stop; what is unfinished goes on at the next start."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def wake(self) -> None:
        """Note that there is a new batch."""
        self._wake.set()

    async def cancel(self, stored: TenantBatches, batch: BatchObject) -> None:
        """Have a batch end with the results that are there."""
        batch.enter("cancelling")
        with contextlib.suppress(OSError):  # its end is written, too
            await stored.save(batch)
        if batch.id in self._jobs:
            self._jobs[batch.id].cancel()
        self._wake.set()

    async def _run(self) -> None:
        """Answer batches for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                while len(self._tenants) < _MAX_BATCHES and (found := self._next()) is not None:
                    tenant = found[0]
                    task = tasks.create_task(self._answer_or_wait(*found), name="batch")
                    self._tenants[tenant] = task
                    task.add_done_callback(partial(self._end_turn, tenant))
                await self._wake.wait()

    def _end_turn(self, tenant: str, _: "asyncio.Task[None]") -> None:
        del self._tenants[tenant]
        self._wake.set()

    async def _answer_or_wait(self, tenant: str, stored: TenantBatches, batch: BatchObject) -> None:
        """Answer a batch; where the disk is full, it has its next turn after a while."""
        try:
            await self._answer_or_fail(tenant, stored, batch)
        except OSError as error:
            _log.error("batches wait: %s", error.strerror)
            await asyncio.sleep(_TRY_AGAIN_SECONDS)

    async def _answer_or_fail(self, tenant: str, stored: TenantBatches, batch: BatchObject) -> None:
        """Answer a batch; a bug in one must not end the others."""
        try:
            await self._answer(tenant, stored, batch)
        except OSError:
            raise
        except Exception:
            _log.exception("a batch failed")
            await self._fail(stored, batch, "internal error; the server's log has more")

    def _next(self) -> tuple[str, TenantBatches, BatchObject] | None:
        """Return the oldest batch of the tenant whose turn was longest ago, and isn't now."""
        found = min(
            (each for each in self.store.unfinished() if each[0] not in self._tenants),
            key=lambda each: (self._turns.get(each[0], 0), each[2].created_at),
            default=None,
        )
        if found is not None:
            self._turn += 1
            self._turns[found[0]] = self._turn
        return found

    async def _answer(self, tenant: str, stored: TenantBatches, batch: BatchObject) -> None:
        """Bring a batch to its end, or to where it can go on."""
        if batch.status in ("validating", "in_progress"):
            if batch.status == "validating":
                batch.enter("in_progress")
                await stored.save(batch)
            try:
                await self._answer_rows(tenant, stored, batch)
            except MidfillError as error:
                await self._fail(stored, batch, str(error))
                return
            if batch.status == "in_progress":
                batch.enter("finalizing")
                await stored.save(batch)
        await self._finalize(stored, batch)

    async def _answer_rows(self, tenant: str, stored: TenantBatches, batch: BatchObject) -> None:
        """Have all rows answered, unless the batch is cancelled meanwhile."""
        api = _PatientApi(InProcessApi(self._service, tenant), self._idle)
        source = RowFile(
            stored.content(batch.input_file_id), self._service.max_body_bytes, (batch.endpoint,)
        )
        with contextlib.closing(source):
            path = stored.results(batch.id)
            results = await asyncio.to_thread(ResultFile, path, lambda: stored.free_bytes)
            try:
                report = partial(_count, batch)
                job = BatchJob(source, results, api, self._budget, report)
                task = asyncio.create_task(job.run(), name=f"batch {batch.id}")
                self._jobs[batch.id] = task
                if batch.status == "cancelling":
                    task.cancel()
                try:
                    await asyncio.wait({task})
                finally:
                    del self._jobs[batch.id]
                    task.cancel()
                    await asyncio.wait({task})
                    _count(batch, job.progress("answering"))
                if not task.cancelled():
                    task.result()
                elif batch.status != "cancelling":
                    raise asyncio.CancelledError
            finally:
                await asyncio.to_thread(results.close)

    async def _fail(self, stored: TenantBatches, batch: BatchObject, reason: str) -> None:
        """End a batch that can't go on; results that are there are given."""
        batch.errors = BatchFaults(data=[BatchFault(code="batch_failed", message=reason)])
        await self._finalize(stored, batch)

    async def _finalize(self, stored: TenantBatches, batch: BatchObject) -> None:
        """Make the files of a batch's results, and end it."""
        results = stored.results(batch.id)
        if results.exists():
            output, errors = stored.begin_result(), stored.begin_result()
            found = await asyncio.to_thread(split_results, results, output, errors)
            if found[0]:
                batch.output_file_id = (await self._keep(stored, output, batch, "output")).id
            if found[1]:
                batch.error_file_id = (await self._keep(stored, errors, batch, "error")).id
        if batch.errors is not None:
            batch.enter("failed")
        else:
            batch.enter("cancelled" if batch.status == "cancelling" else "completed")
        await stored.save(batch)
        results.unlink(missing_ok=True)
        counts = batch.request_counts
        _log.info(
            "batch %s is %s: %d rows, %d answered, %d errors",
            batch.id, batch.status, counts.total, counts.completed, counts.failed,
        )  # fmt: skip

    async def _keep(
        self, stored: TenantBatches, path: Path, batch: BatchObject, kind: str
    ) -> FileObject:
        return await stored.add_file(path, f"{batch.id}_{kind}.jsonl", "batch_output")


def _count(batch: BatchObject, progress: BatchProgress) -> None:
    """Show a batch's progress in its counts."""
    batch.request_counts = RequestCounts(
        total=progress.rows or batch.request_counts.total,  # 0 before they are read
        completed=progress.done - progress.failed,
        failed=progress.failed,
    )
