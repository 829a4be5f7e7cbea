"""run_server: from ServeOptions to a running server: bind, load, listen."""

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import APIRouter
from msgspec import structs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from midfill.config import ModelOptions
from midfill.engine.disaggregated.client import DisaggregatedClient
from midfill.engine.messages import EngineInfo
from midfill.engine.process.client import EngineClient
from midfill.engine.process.supervision import EngineProcess
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.infill.formats import FimFormat
from midfill.infill.window import WindowRule
from midfill.methods.resolver import AllowedMethods
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill.serving.server.app import DIALECTS, create_app
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.batch.api import RowService
from midfill.serving.server.batch.routes import batch_dialect
from midfill.serving.server.batch.store import BatchStore
from midfill.serving.server.batch.worker import BatchWorker
from midfill.serving.server.batch.yielding import InteractiveLoad, YieldingEngine
from midfill.serving.server.key_file import key_digest
from midfill.serving.server.kv_routes import kv_routes
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.listening import Listener, answer_until_stopped, listen
from midfill.serving.server.metrics import Families, families
from midfill.serving.server.served_engine import ServedEngine
from midfill.serving.server.service import ModelService
from midfill.system.cache import cache_folder
from midfill.system.extras import require
from midfill.system.process import without_collections
from midfill.system.progress import Progress

AnyService = TypeVar("AnyService", bound=ModelService)
_WORKER_LABELS = ("role", "worker")

_WORKER_GAUGES: dict[str, tuple[str, Callable[[EngineClient], float]]] = {
    "worker_up": ("Whether it takes requests.", lambda each: each.state == "ready"),
    "worker_requests_running": ("Answers that hold KV there.", lambda each: each.stats.running),
    "worker_requests_waiting": ("Answers in its queue.", lambda each: each.stats.waiting),
    "worker_kv_slots": ("Its KV slots (tokens) in total.", lambda each: each.stats.slots_total),
    "worker_kv_slots_free": ("Its empty KV slots.", lambda each: each.stats.slots_free),
    "worker_kv_slots_cached": (
        "Its KV slots of the prefix cache that no answer uses.",
        lambda each: each.stats.slots_cached,
    ),
}

_WORKER_COUNTERS: dict[str, tuple[str, Callable[[EngineClient], float]]] = {
    "worker_steps": ("Its forward passes.", lambda each: each.stats.steps),
    "worker_busy_seconds": ("Time it spent in steps.", lambda each: each.stats.busy_seconds),
    "worker_computed_tokens": (
        "Tokens that went through its model.",
        lambda each: each.stats.computed_tokens,
    ),
    "worker_generated_tokens": ("Tokens that it generated.", lambda w: w.stats.generated_tokens),
    "worker_restarts": ("How often it was restarted.", lambda each: each.restarts),
}

_TRANSFER_COUNTERS: dict[str, tuple[str, Callable[[DisaggregatedClient], float]]] = {
    "kv_transferred_bytes": (
        "KV that went from prefill to decode workers.",
        lambda engine: engine.transferred_bytes,
    ),
    "kv_transfer_seconds": ("Time that this took.", lambda engine: engine.transfer_seconds),
    "resumed_requests": (
        "Requests that went on at another worker after one was lost.",
        lambda engine: engine.resumed,
    ),
}


def run_server(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None = None,
    on_ready: Callable[[str, EngineInfo, ModelService], None] | None = None,
    spawned: EngineProcess | None = None,
) -> None:
    """Serve until interrupted.

    Args:
        options: what to serve and how.
        path: the checkpoint, already on disk.
        on_progress: called with (stage, done, total) while the engine loads.
        on_ready: called with the URL, the engine's info and the service once clients can connect.
        spawned: a process for the engine that was started ahead; the caller discards it.

    Raises:
        MidfillError: the address can't be used, the model can't be loaded, or libraries that the
            options need are not installed.
    """
    listen(options, partial(_serve, options, path, on_progress, on_ready, spawned))


@contextlib.asynccontextmanager
async def open_service(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None = None,
    tenants: Sequence[str] = ("",),
    limits: RateLimits | None = None,
    spawned: EngineProcess | None = None,
) -> AsyncIterator[ModelService]:
    """Load a model and start its engine process; both end with the ``with`` block.

    Args:
        options: what to serve and how.
        path: the checkpoint, already on disk.
        on_progress: called with (stage, done, total) while the engine loads.
        tenants: everybody who may send requests.
        limits: what they may use; None is everything.
        spawned: a process for the engine that was started ahead.

    Raises:
        MidfillError: the model can't be loaded.
    """
    async with (
        open_engine(options, path, on_progress, spawned) as opened,
        _service_of(options, opened, tenants, limits) as service,
    ):
        yield service


@contextlib.asynccontextmanager
async def _service_of(
    options: ServeOptions,
    opened: "OpenedModel",
    tenants: Sequence[str],
    limits: RateLimits | None,
) -> AsyncIterator[ModelService]:
    """Return the service of a model whose engine runs; it ends with the ``with`` block."""
    service = await assemble_service(
        options, opened.checkpoint, opened.format, opened.engine, opened.info, tenants, limits
    )
    if isinstance(opened.engine, DisaggregatedClient):
        service.metrics.add(partial(worker_metrics, opened.engine))
    try:
        yield service
    finally:
        service.close()


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose engine runs.

    Attributes:
        checkpoint: opened for its prompts.
        format: its FIM tokens.
        engine: runs it.
        info: what the engine reported of itself.
    """

    checkpoint: Checkpoint
    format: FimFormat | None
    engine: EngineClient | DisaggregatedClient
    info: EngineInfo


@contextlib.asynccontextmanager
async def open_engine(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None = None,
    spawned: EngineProcess | None = None,
) -> AsyncIterator[OpenedModel]:
    """Load a model and start its engine; see ``open_service``."""
    run = options.options
    AllowedMethods(run.allow_methods, run.method)  # checks them
    engine = _engine_client(options, path, on_progress, spawned)
    starting = asyncio.ensure_future(engine.start())
    try:
        # Meanwhile, the model is opened here, too; its faults are told by whoever finds them here.
        checkpoint, format = await asyncio.to_thread(_open_for_prompts, options, path)
        yield OpenedModel(checkpoint, format, engine, await starting)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.close()


def _open_for_prompts(options: ServeOptions, path: Path) -> tuple[Checkpoint, FimFormat | None]:
    """Open the model for what its prompts need, with all that the first request would wait for."""
    run = options.options
    with without_collections():
        checkpoint = open_model(path, run.adapter_path, run.weights)
        format = fim_format(checkpoint, options.fim_tokens)
        checkpoint.tokenizer.prepare()
    return checkpoint, format


def _engine_client(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None,
    spawned: EngineProcess | None,
) -> EngineClient | DisaggregatedClient:
    """Return the engine that the options ask for, not yet started."""
    client = (
        partial(DisaggregatedClient, workers=options.workers)
        if options.workers.prefill
        else EngineClient
    )
    return client(
        path,
        _with_scope(options.options, options.api_keys),
        on_progress=on_progress,
        max_queued_tokens=options.max_queued_tokens,
        logs=options.logs,
        step_timeout=options.step_timeout,
        max_tenant_tokens=options.max_queued_tokens_per_key,
        spawned=spawned,
    )


async def assemble_service(
    options: ServeOptions,
    checkpoint: Checkpoint,
    format: FimFormat | None,
    engine: ServedEngine,
    info: EngineInfo,
    tenants: Sequence[str],
    limits: RateLimits | None,
) -> ModelService:
    """Return the service of a model whose engine runs, here or elsewhere.

    Args:
        options: what to serve and how.
        checkpoint: the model's; only its tokenizer and what it says of itself are read.
        format: its FIM tokens.
        engine: runs it.
        info: what the engine reported of itself.
        tenants: everybody who may send requests.
        limits: what they may use; None is everything.
    """
    return await _assemble(ModelService, options, checkpoint, format, engine, info, tenants, limits)


async def _assemble(
    kind: type[AnyService],
    options: ServeOptions,
    checkpoint: Checkpoint,
    format: FimFormat | None,
    engine: ServedEngine,
    info: EngineInfo,
    tenants: Sequence[str] = ("",),
    limits: RateLimits | None = None,
    *,
    remembers: bool = True,
) -> AnyService:
    """Return a service of some kind; ``remembers`` is ``PromptEncoder``'s."""
    run = options.options
    window = None if options.window is None else WindowRule(*options.window)
    prompts = await asyncio.to_thread(
        PromptEncoder, checkpoint, format, info.context, window, options.snippets,
        options.document_memory, remembers=remembers,
    )  # fmt: skip
    return kind(
        options.served_name or _short_name(options.model),
        engine,
        checkpoint.tokenizer,
        prompts,
        options.max_body_bytes,
        aliases=options.aliases,
        check_method=AllowedMethods(run.allow_methods, run.method).check,
        idle_prefill=options.idle_prefill,
        stream_interval=options.stream_interval,
        completion_timeout=options.completion_timeout,
        min_confidence=options.min_confidence,
        candidates=None if sum(options.workers) else options.candidates,
        tenants=tenants,
        limits=limits,
    )


async def open_row_service(
    options: ServeOptions, opened: OpenedModel, engine: ServedEngine | None = None
) -> RowService:
    """Return the service of a model that answers the rows of batches.

    Args:
        options: what to serve and how. Nothing is computed in idle time, and nobody gives up.
        opened: the model.
        engine: runs it; None takes the opened one.
    """
    rows = dataclasses.replace(options, idle_prefill=False, completion_timeout=0.0)
    return await _assemble(
        RowService, rows, opened.checkpoint, opened.format, engine or opened.engine, opened.info,
        remembers=False,
    )  # fmt: skip


async def _serve(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None,
    on_ready: Callable[[str, EngineInfo, ModelService], None] | None,
    spawned: EngineProcess | None,
    listener: Listener,
) -> None:
    keys, load = listener.keys, InteractiveLoad()
    limits = RateLimits(keys.limits_of, on_running=load.record)
    async with (
        open_engine(options, path, on_progress, spawned) as opened,
        _service_of(options, opened, keys.tenants, limits) as service,
        _open_batches(options, opened, keys, load) as batches,
    ):

        def listening() -> None:
            if on_ready is not None:
                on_ready(listener.url, opened.info, service)

        app = create_app(
            service,
            keys,
            listener.traces,
            DIALECTS if batches is None else (*DIALECTS, batch_dialect(batches)),
            redact=options.logs.redact,
            own_hosts=listener.own_hosts,
            kv=_kv_routes(options, service),
        )
        await answer_until_stopped(app, listener, service, listening, options=options.listen)


@contextlib.asynccontextmanager
async def _open_batches(
    options: ServeOptions, opened: OpenedModel, keys: KeyRing, load: InteractiveLoad
) -> AsyncIterator[BatchWorker | None]:
    """Answer stored batches within the ``with`` block; None without an option that asks for it.

    Raises:
        MidfillError: their folder can't be used, or a library is missing.
    """
    limits = options.batches
    if not limits.storage:
        yield None
        return
    require("--batch-storage", ["python_multipart"], extra="batch")
    folder = cache_folder() / "batches" if limits.folder is None else Path(limits.folder)
    store = BatchStore(folder, limits.storage, limits.files, keys.identity)
    try:
        for tenant in keys.tenants:
            store.of(tenant)  # so that their unfinished batches go on
        service = await open_row_service(options, opened, YieldingEngine(opened.engine, load))
        try:
            worker = BatchWorker(store, service, load, opened.info.slots)
            worker.start()
            try:
                yield worker
            finally:
                await worker.close()
        finally:
            service.close()
    finally:
        store.close()


def _kv_routes(options: ServeOptions, service: ModelService) -> APIRouter | None:
    """Return the routes that move KV, if there is a key for them."""
    engine = service.engine
    if options.kv_transfer_key is None or not isinstance(
        engine, EngineClient | DisaggregatedClient
    ):
        return None
    return kv_routes(engine, options.kv_transfer_key)


def _with_scope(options: ModelOptions, api_keys: Sequence[str]) -> ModelOptions:
    """Return the engine's options with what makes the tenants' names unique beyond this server.

    Keys without a file have names by their order, which may be others' at the next start.
    """
    if not api_keys:
        return options
    digests = b"".join(key_digest(key.encode()) for key in api_keys)
    tier = structs.replace(options.warm_tier, scope=hashlib.sha256(digests).hexdigest())
    return structs.replace(options, warm_tier=tier)


def _short_name(model: str) -> str:
    """Return the last part of a path to a file or folder; any other name as it is."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    return path.stem if path.is_file() else path.name


def worker_metrics(engine: DisaggregatedClient) -> Families:
    """Yield gauges and counters of the workers, and of what they hand over, as of now."""
    rows = [((role, str(number)), client) for role, number, client in engine.workers]
    yield from families(GaugeMetricFamily, _WORKER_GAUGES, rows, _WORKER_LABELS)
    yield from families(CounterMetricFamily, _WORKER_COUNTERS, rows, _WORKER_LABELS)
    yield from families(CounterMetricFamily, _TRANSFER_COUNTERS, [((), engine)])
