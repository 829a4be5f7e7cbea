"""run_server: from ServeOptions to a running server: bind, load, listen."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn

from midfill.checkpoints.opening import open_model
from midfill.config import ServeOptions
from midfill.engine.client import EngineClient
from midfill.engine.messages import EngineInfo
from midfill.errors import MidfillError
from midfill.frontend.prompts import PromptEncoder, fim_format
from midfill.infill.window import WindowRule
from midfill.methods.shelf import AllowedMethods
from midfill.server.app import create_app
from midfill.server.key_ring import KeyRing
from midfill.server.request_log import Traces
from midfill.server.service import ModelService
from midfill.system.extras import require
from midfill.system.progress import Progress

_log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 3  # for answers in progress; then they are cut off


def run_server(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None = None,
    on_ready: Callable[[str, EngineInfo, ModelService], None] | None = None,
) -> None:
    """Serve until interrupted.

    Args:
        options: what to serve and how.
        path: the checkpoint, already on disk.
        on_progress: called with (stage, done, total) while the engine loads.
        on_ready: called with the URL, the engine's info and the service once clients can connect.

    Raises:
        MidfillError: the address can't be used, the model can't be loaded, or libraries that the
            options need are not installed.
    """
    keys = KeyRing(options.api_keys, options.api_key_file)
    with (
        _bind(options.host, options.port) as listener,
        _open_traces(options.otlp_traces_endpoint) as traces,
    ):
        if not keys and not _is_loopback(listener):
            _log.warning(
                "other machines can use the model: the server listens on %s and needs no API key;"
                " set --api-key, --api-key-file or MIDFILL_API_KEY, or listen on 127.0.0.1",
                options.host,
            )
        try:
            asyncio.run(_serve(options, path, keys, listener, traces, on_progress, on_ready))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)


@contextlib.asynccontextmanager
async def open_service(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None = None,
    tenants: Sequence[str] = ("",),
) -> AsyncIterator[ModelService]:
    """Load a model and start its engine process; both end with the ``with`` block.

    Args:
        options: what to serve and how.
        path: the checkpoint, already on disk.
        on_progress: called with (stage, done, total) while the engine loads.
        tenants: everybody who may send requests.

    Raises:
        MidfillError: the model can't be loaded.
    """
    # Opened here first, so that its faults are reported before a process is started for it.
    run = options.options
    methods = AllowedMethods(run.allow_methods, run.method)
    checkpoint = open_model(path, run.adapter_path, run.weights)
    engine = EngineClient(
        path,
        run,
        on_progress,
        max_queued_tokens=options.max_queued_tokens,
        logs=options.logs,
        step_timeout=options.step_timeout,
    )
    try:
        # Both take a while: building the tokenizer and starting the engine.
        format, info = await asyncio.gather(
            asyncio.to_thread(fim_format, checkpoint, options.fim_tokens), engine.start()
        )
        window = None if options.window is None else WindowRule(*options.window)
        prompts = await asyncio.to_thread(PromptEncoder, checkpoint, format, info.context, window)
        name = options.served_name or _short_name(options.model)
        service = ModelService(
            name,
            engine,
            checkpoint.tokenizer,
            prompts,
            options.max_body_bytes,
            aliases=options.aliases,
            methods=methods,
            idle_prefill=options.idle_prefill,
            stream_interval=options.stream_interval,
            tenants=tenants,
        )
        try:
            yield service
        finally:
            service.close()
    finally:
        await engine.close()


async def _serve(
    options: ServeOptions,
    path: Path,
    keys: KeyRing,
    listener: socket.socket,
    traces: Traces | None,
    on_progress: Progress | None,
    on_ready: Callable[[str, EngineInfo, ModelService], None] | None,
) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    # Until uvicorn installs its own handler, so that SIGTERM while loading also ends the engine.
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    async with open_service(options, path, on_progress, keys.tenants) as service:
        config = uvicorn.Config(
            create_app(service, keys, traces),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        # From here on connections wait in the backlog until uvicorn accepts them, so that clients
        # can connect as soon as on_ready is called.
        listener.listen(config.backlog)
        if on_ready is not None and service.engine.info is not None:
            on_ready(_url(listener), service.engine.info, service)
        loop.remove_signal_handler(signal.SIGTERM)
        if options.api_key_file is not None and hasattr(signal, "SIGHUP"):  # not on Windows
            loop.add_signal_handler(signal.SIGHUP, keys.reload)
        # uvicorn raises the signal that stopped it again when it is done.
        signal.signal(signal.SIGTERM, _exit)
        await uvicorn.Server(config).serve(sockets=[listener])


@contextlib.contextmanager
def _open_traces(endpoint: str | None) -> Iterator[Traces | None]:
    """Yield where traces go, if they go anywhere; what is left is sent at the end."""
    if endpoint is None:
        yield None
        return
    libraries = ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"]
    require("--otlp-traces-endpoint", libraries, extra="otel")
    from midfill.server.tracing import RequestTraces

    traces = RequestTraces(endpoint)
    try:
        yield traces
    finally:
        traces.close()


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _short_name(model: str) -> str:
    """Return the last part of a path to a file or folder; any other name as it is."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    return path.stem if path.is_file() else path.name


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; it listens once the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MidfillError(
            f"can't listen on {host}:{port} ({reason}); choose another --host or --port"
        ) from error
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    host = listener.getsockname()[0].partition("%")[0]  # without an IPv6 zone
    return ipaddress.ip_address(host).is_loopback


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"
