"""Listening: from an address to an application that answers there until it is interrupted."""

import asyncio
import contextlib
import ipaddress
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from midfill.config import ListenOptions
from midfill.errors import MidfillError
from midfill.serving.server.connection_metrics import ConnectionCollector
from midfill.serving.server.connections import ConnectionCounts, ConnectionLimits, limited_protocol
from midfill.serving.server.key_ring import KeyRing
from midfill.serving.server.request_log import Traces
from midfill.serving.server.service import ModelService
from midfill.serving.server.tls import ServerTls
from midfill.system.extras import require
from midfill.system.process import freeze_objects, raise_open_file_limit

_log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2  # for the errors of requests that the server's end has ended
_OTHER_FILES = 256  # that the process has open, or may open, beside connections


async def answer_until_stopped(
    app: ASGIApp,
    listener: socket.socket,
    service: ModelService,
    on_listening: Callable[[], None],
    on_hangup: Callable[[], None] | None = None,
    options: ListenOptions | None = None,
    tls: ServerTls | None = None,
) -> None:
    """Serve an application until the process is interrupted.

    Then no connections are accepted any more, and answers in progress may end. Those that take too
    long fail as requests do whose engine has died: the client may try again.

    Args:
        app: what answers.
        listener: a bound socket.
        service: the application's model.
        on_listening: called once clients can connect.
        on_hangup: called at each SIGHUP.
        options: bounds; None takes the defaults.
        tls: encrypts connections; None speaks plain HTTP.
    """
    options = options or ListenOptions()
    loop = asyncio.get_running_loop()
    counts = ConnectionCounts()
    service.metrics.add(ConnectionCollector(counts))
    limits = ConnectionLimits(
        max_connections=_supported_connections(options.max_connections),
        client_timeout=options.client_timeout,
    )
    config = uvicorn.Config(
        app,
        http=limited_protocol(limits, counts),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(options.drain_timeout) + _LAST_WORDS_SECONDS,
    )
    config.load()
    config.ssl = None if tls is None else tls.context
    # From here on connections wait in the backlog until uvicorn accepts them, so that clients
    # can connect as soon as on_listening is called.
    listener.listen(config.backlog)
    freeze_objects()
    on_listening()
    loop.remove_signal_handler(signal.SIGTERM)
    if on_hangup is not None and hasattr(signal, "SIGHUP"):  # not on Windows
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    # uvicorn raises the signal that stopped it again when it is done.
    signal.signal(signal.SIGTERM, _exit)
    await _Server(config, service, options.drain_timeout).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which tells a service when its time is over."""

    def __init__(self, config: uvicorn.Config, service: ModelService, seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers in progress end, and then end them."""
        if self.server_state.tasks:
            _log.info(
                "stopping; %d requests have up to %g s to end",
                len(self.server_state.tasks), self._seconds,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, self._service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _supported_connections(wanted: int) -> int:
    """Return how many connections the process's limit of open files allows, raising the limit."""
    files = raise_open_file_limit(wanted + _OTHER_FILES)
    if files >= wanted + _OTHER_FILES:
        return wanted
    supported = max(files - _OTHER_FILES, files // 2)
    _log.warning(
        "this process may have %d files open, so at most %d connections; raise 'ulimit -n' for"
        " --max-connections %d", files, supported, wanted,
    )  # fmt: skip
    return supported


def cancel_on_termination() -> None:
    """Have SIGTERM cancel the current task, until ``answer_until_stopped`` listens."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def own_hosts(
    listener: socket.socket, host: str, keys: KeyRing, allowed: Sequence[str]
) -> tuple[str, ...] | None:
    """Return the names that a server answers under, beside its machine's own; None: any.

    Args:
        listener: where it listens.
        host: the same as its operator has written it.
        keys: with any, who asks is known, so names don't matter.
        allowed: names that its operator allows.
    """
    return None if keys or not _is_loopback(listener) else (host, *allowed)


def warn_if_open(listener: socket.socket, host: str, keys: KeyRing, tls: ServerTls | None) -> None:
    """Log warnings if other machines can connect and need no key, or send it unencrypted."""
    if _is_loopback(listener):
        return
    if not keys:
        _log.warning(
            "other machines can use the model: the server listens on %s and needs no API key;"
            " set --api-key, --api-key-file or MIDFILL_API_KEY, or listen on 127.0.0.1",
            host,
        )
    if tls is None:
        _log.warning(
            "texts and keys travel unencrypted: the server listens on %s without TLS; set"
            " --ssl-certfile and --ssl-keyfile, or listen on 127.0.0.1 behind a proxy with TLS",
            host,
        )


@contextlib.contextmanager
def open_traces(endpoint: str | None) -> Iterator[Traces | None]:
    """Yield where traces go, if they go anywhere; what is left is sent at the end."""
    if endpoint is None:
        yield None
        return
    libraries = ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"]
    require("--otlp-traces-endpoint", libraries, extra="otel")
    from midfill.serving.server.tracing import RequestTraces

    traces = RequestTraces(endpoint)
    try:
        yield traces
    finally:
        traces.close()


def bind(host: str, port: int) -> socket.socket:
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


def url_of(listener: socket.socket, tls: ServerTls | None = None) -> str:
    """Return the URL that clients on this machine reach it by."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'http' if tls is None else 'https'}://{host}:{port}"


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
