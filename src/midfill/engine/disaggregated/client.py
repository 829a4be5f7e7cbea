"""DisaggregatedClient: prefill and decode engine processes, as the server sees one engine.

Each worker is an ``EngineClient``, which restarts its process when that dies or hangs.
``DisaggregatedEngine`` sends requests to them.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import structs

from midfill.config import (
    DEFAULT_MAX_QUEUED_TOKENS,
    DEFAULT_STEP_TIMEOUT,
    LogOptions,
    ModelOptions,
    WarmTierOptions,
    Workers,
)
from midfill.engine.disaggregated.engine import DisaggregatedEngine
from midfill.engine.disaggregated.workers import DecodeLimits, Pool, PrefillLimits
from midfill.engine.messages import EngineInfo
from midfill.engine.process.aggregate import total_stats, total_tenants
from midfill.engine.process.client import EngineClient
from midfill.engine.process.outputs import OutputStream
from midfill.engine.process.supervision import EngineProcess
from midfill.engine.request import EngineRequest, EngineStats, TenantStats
from midfill.engine.scheduling.admission import Admission
from midfill.errors import EngineDeadError, KvTransferError
from midfill.system.cache import cache_folder
from midfill.system.machine import available_threads
from midfill.system.progress import Progress

Role = Literal["prefill", "decode"]

_NO_LIMIT = 2**62  # of tokens that a worker queues: what may be queued is decided here
_STATES = ("ready", "unresponsive", "restarting", "starting")  # the best first


class Worker(NamedTuple):
    """One worker: what it does, its number among those that do, and its engine."""

    role: Role
    number: int
    engine: EngineClient


class DisaggregatedClient:
    """See ``serving.server.served_engine.ServedEngine``."""

    def __init__(
        self,
        path: Path,
        options: ModelOptions,
        workers: Workers,
        on_progress: Progress | None = None,
        max_queued_tokens: int = DEFAULT_MAX_QUEUED_TOKENS,
        logs: LogOptions | None = None,
        step_timeout: float = DEFAULT_STEP_TIMEOUT,
        max_tenant_tokens: int | None = None,
        spawned: EngineProcess | None = None,
    ) -> None:
        """Prepare the workers; ``start`` starts them.

        Args:
            workers: how many there are.
            path, options, on_progress, max_queued_tokens, logs, step_timeout, max_tenant_tokens:
                as of ``EngineClient``, which each worker has of its own; threads and memory that
                the options leave open are divided.
            spawned: the first process of the first worker, if it was started ahead.
        """

        def worker(role: Role, number: int) -> Worker:
            own = worker_options(options, workers, role, number)
            shown = on_progress if (role, number) == ("prefill", 0) else None
            ahead = spawned if (role, number) == ("prefill", 0) else None
            engine = EngineClient(path, own, shown, _NO_LIMIT, logs, step_timeout, _NO_LIMIT, ahead)
            return Worker(role, number, engine)

        self.workers = [worker("prefill", number) for number in range(workers.prefill)]
        self.workers += [worker("decode", number) for number in range(workers.decode)]
        self.info: EngineInfo | None = None
        self._admission = Admission(max_queued_tokens, max_tenant_tokens)
        self._engine: DisaggregatedEngine | None = None

    def of_role(self, role: Role) -> Iterator[EngineClient]:
        """Yield the engines of the workers of one kind."""
        return (worker.engine for worker in self.workers if worker.role == role)

    async def start(self) -> EngineInfo:
        """Start all workers and wait until they are ready.

        The first one alone: what it compiles and packs, the others find.

        Raises:
            MidfillError: one of them can't start.
        """
        first, *others = (worker.engine for worker in self.workers)
        infos = [await first.start(), *await asyncio.gather(*(each.start() for each in others))]
        self._engine = DisaggregatedEngine(
            [(engine, _prefill_limits(engine.info)) for engine in self.of_role("prefill")],
            [(engine, _decode_limits(engine.info)) for engine in self.of_role("decode")],
            self._admission,
            min(info.context for info in infos),
        )
        self.info = self._combined(infos)
        prompts = (engine.info for engine in self.of_role("prefill"))
        self._admission.work.slots = sum(info.slots for info in prompts if info is not None)
        return self.info

    async def close(self) -> None:
        """End all requests and workers."""
        if self._engine is not None:
            await self._engine.close()
        await asyncio.gather(*(worker.engine.close() for worker in self.workers))

    def _combined(self, infos: Sequence[EngineInfo]) -> EngineInfo:
        """Return what all workers are together."""
        roles = [worker.role for worker in self.workers]
        return structs.replace(
            infos[0],
            backend=f"{infos[0].backend} in each of {roles.count('prefill')} prefill and"
            f" {roles.count('decode')} decode workers",
            weight_bytes=sum(info.weight_bytes for info in infos),
            kv_bytes=sum(info.kv_bytes for info in infos),
            slots=sum(info.slots for info in infos),
            context=min(info.context for info in infos),
            max_running=sum(
                info.max_running
                for info, role in zip(infos, roles, strict=True)
                if role == "decode"
            ),
            load_seconds=sum(info.load_seconds for info in infos[:1])
            + max((info.load_seconds for info in infos[1:]), default=0.0),
        )

    # --- requests ---

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Queue requests, all or none; the stream yields their outputs.

        Raises:
            InvalidRequestError: one of them fits no worker.
            EngineDeadError: no worker is ready.
            QueueFullError: too many tokens are queued, or too many for the deadline.
        """
        if self._engine is None:
            raise EngineDeadError("the engine is starting; try again in a moment", retry_after=1)
        return self._engine.submit(*requests)

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

    # --- KV ---

    @property
    def kv_bytes(self) -> int:
        """Size of the largest KV pool, 0 before the engine was ready."""
        return max(worker.engine.kv_bytes for worker in self.workers)

    async def cached_tokens(self, tenant: str, token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's tokens every prefill worker has cached.

        Raises:
            EngineDeadError: no prefill worker is ready.
        """
        finds = (engine.cached_tokens(tenant, token_ids) for engine in self.of_role("prefill"))
        return _least(await asyncio.gather(*finds, return_exceptions=True))

    async def export_kv(self, tenant: str, token_ids: Sequence[int], start: int = 0) -> memoryview:
        """Return an encoded ``KvBlob`` of what prefill workers have cached of a prompt.

        Without the first ``start`` of its tokens, which the receiver has.

        Raises:
            EngineDeadError: no prefill worker is ready.
            KvTransferError: nothing of it is cached, or nothing after ``start``.
        """
        exports = (engine.export_kv(tenant, token_ids, start) for engine in self.of_role("prefill"))
        results = await asyncio.gather(*exports, return_exceptions=True)
        blobs = [result for result in results if isinstance(result, memoryview)]
        if blobs:
            return max(blobs, key=len)
        raise _most_telling(results)

    async def import_kv(
        self, tenant: str, blob: bytes | memoryview, before: Sequence[int] = ()
    ) -> int:
        """Put an encoded ``KvBlob`` into the prefix caches of prefill workers.

        Of all of them: which document it belongs to is not known. ``before`` are the tokens that an
        export has left out.

        Returns:
            How many of its tokens are cached then.

        Raises:
            EngineDeadError: no prefill worker is ready.
            KvTransferError: the blob is damaged, or of another model or tenant.
        """
        imports = (engine.import_kv(tenant, blob, before) for engine in self.of_role("prefill"))
        return _least(await asyncio.gather(*imports, return_exceptions=True))

    # --- numbers ---

    @property
    def state(self) -> str:
        """ "ready" while requests are accepted: one worker suffices."""
        states = {worker.engine.state for worker in self.workers}
        return next((state for state in _STATES if state in states), "dead")

    @property
    def stats(self) -> EngineStats:
        """Sums over workers. A request that waits between them is one that waits."""
        total = total_stats(worker.engine.stats for worker in self.workers)
        between = 0 if self._engine is None else self._engine.waiting.total()
        return structs.replace(total, waiting=total.waiting + between)

    @property
    def tenants(self) -> dict[str, TenantStats]:
        """The same by tenant."""
        tenants = total_tenants(worker.engine.tenants for worker in self.workers)
        for tenant, count in ({} if self._engine is None else self._engine.waiting).items():
            known = tenants.get(tenant, TenantStats())
            tenants[tenant] = structs.replace(known, waiting=known.waiting + count)
        return tenants

    @property
    def restarts(self) -> int:
        """How often workers were restarted."""
        return sum(worker.engine.restarts for worker in self.workers)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests without an output, background requests not counted."""
        return self._admission.queued_tokens

    @property
    def retry_after(self) -> int:
        """Seconds after which a request that failed for lack of a worker may succeed."""
        return min(worker.engine.retry_after for worker in self.workers)

    @property
    def transferred_bytes(self) -> int:
        """KV that went from prefill to decode workers."""
        return 0 if self._engine is None else self._engine.transferred_bytes

    @property
    def transfer_seconds(self) -> float:
        """Time that it took."""
        return 0.0 if self._engine is None else self._engine.transfer_seconds

    @property
    def resumed(self) -> int:
        """Requests that went on at another worker after one was lost."""
        return 0 if self._engine is None else self._engine.resumed


def worker_options(
    options: ModelOptions, workers: Workers, role: Role, number: int
) -> ModelOptions:
    """Return a worker's options: its part of what the machine has.

    The warm tier is the prefill workers', which hold the documents; each has a folder of its own.
    """
    total = workers.prefill + workers.decode
    tier = options.warm_tier
    if role == "decode":
        tier = WarmTierOptions(scope=tier.scope)
    elif workers.prefill > 1:
        folder = cache_folder() / "kv" if tier.folder is None else Path(tier.folder)
        tier = structs.replace(
            tier,
            memory=tier.memory // workers.prefill,
            disk=tier.disk // workers.prefill,
            folder=str(folder.expanduser() / f"prefill-{number}"),
        )
    return structs.replace(
        options,
        threads=options.threads or max(1, available_threads() // total),
        memory_share=options.memory_share / total,
        reuse="off",  # KV under a method stays where it is computed
        warm_tier=tier,
    )


def _prefill_limits(info: EngineInfo | None) -> PrefillLimits:
    """Return what a prefill worker takes: its own scheduler decides what runs at once."""
    assert info is not None
    return PrefillLimits(
        pool=Pool(pages=info.slots, page_tokens=1),
        max_batch=info.max_running,
        max_batch_tokens=info.slots,
        saturating_tokens=info.slots,
        whole_batches=False,
    )


def _decode_limits(info: EngineInfo | None) -> DecodeLimits:
    assert info is not None
    return DecodeLimits(pool=Pool(pages=info.slots, page_tokens=1), max_batch=info.max_running)


def _least(results: Sequence[object]) -> int:
    """Return the least number of those that worked; raise what says most if none has."""
    numbers = [result for result in results if isinstance(result, int)]
    if not numbers:
        raise _most_telling(results)
    return min(numbers)


def _most_telling(results: Sequence[object]) -> BaseException:
    """Return the error that says most about why nothing worked."""
    errors = [result for result in results if isinstance(result, BaseException)]
    return min(errors, key=lambda error: not isinstance(error, KvTransferError))
