"""run_server: from ServeOptions to a running server: bind, load, listen."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from midfill.engine.disaggregated.client import DisaggregatedClient
from midfill.engine.messages import EngineInfo
from midfill.engine.process.client import EngineClient
from midfill.engine.process.supervision import EngineProcess
from midfill.serving.options import ServeOptions
from midfill.serving.server.app import DIALECTS, create_app
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.dialects.dialect import Dialect
from midfill.serving.server.kv_routes import kv_routes
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.listening import Listener, answer_until_stopped, listen
from midfill.serving.server.metrics import Families, families
from midfill.serving.server.opened_model import OpenedModel, assemble_service, open_engine
from midfill.serving.server.service import ModelService
from midfill.system.progress import Progress

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
        service_of(options, opened, tenants, limits) as service,
    ):
        yield service


@contextlib.asynccontextmanager
async def service_of(
    options: ServeOptions,
    opened: OpenedModel,
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


async def _serve(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None,
    on_ready: Callable[[str, EngineInfo, ModelService], None] | None,
    spawned: EngineProcess | None,
    listener: Listener,
) -> None:
    keys, limits = listener.keys, RateLimits(listener.keys.limits_of)
    async with (
        open_engine(options, path, on_progress, spawned) as opened,
        service_of(options, opened, keys.tenants, limits) as service,
        _dialects(options, opened, keys, limits) as dialects,
    ):

        def listening() -> None:
            if on_ready is not None:
                on_ready(listener.url, opened.info, service)

        app = create_app(
            service,
            keys,
            listener.traces,
            dialects,
            redact=options.logs.redact,
            own_hosts=listener.own_hosts,
            kv=_kv_routes(options, service),
        )
        await answer_until_stopped(app, listener, service, listening, options=options.listen)


@contextlib.asynccontextmanager
async def _dialects(
    options: ServeOptions, opened: OpenedModel, keys: KeyRing, limits: RateLimits
) -> AsyncIterator[Sequence[Dialect]]:
    """Return the dialects to answer in; batches are answered within the ``with`` block."""
    if not options.batches.storage:
        yield DIALECTS
        return
    from midfill.serving.server.batch.opening import open_batches  # few servers need it

    async with open_batches(options, opened, keys, limits) as dialect:
        yield (*DIALECTS, dialect)


def _kv_routes(options: ServeOptions, service: ModelService) -> APIRouter | None:
    """Return the routes that move KV, if there is a key for them."""
    engine = service.engine
    if options.kv_transfer_key is None or not isinstance(
        engine, EngineClient | DisaggregatedClient
    ):
        return None
    return kv_routes(engine, options.kv_transfer_key)


def worker_metrics(engine: DisaggregatedClient) -> Families:
    """Yield gauges and counters of the workers, and of what they hand over, as of now."""
    rows = [((role, str(number)), client) for role, number, client in engine.workers]
    yield from families(GaugeMetricFamily, _WORKER_GAUGES, rows, _WORKER_LABELS)
    yield from families(CounterMetricFamily, _WORKER_COUNTERS, rows, _WORKER_LABELS)
    yield from families(CounterMetricFamily, _TRANSFER_COUNTERS, [((), engine)])
