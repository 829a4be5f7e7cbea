"""Listening: from an address to an application that answers there until it is interrupted."""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from midfill.errors import MidfillError
from midfill.server.key_ring import KeyRing
from midfill.server.request_log import Traces
from midfill.server.tls import ServerTls
from midfill.system.extras import require

_log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 3  # for answers in progress; then they are cut off


async def answer_until_stopped(
    app: ASGIApp,
    listener: socket.socket,
    on_listening: Callable[[], None],
    on_hangup: Callable[[], None] | None = None,
    tls: ServerTls | None = None,
) -> None:
    """Serve an application until the process is interrupted.

    Args:
        app: what answers.
        listener: a bound socket.
        on_listening: called once clients can connect.
        on_hangup: called at each SIGHUP.
        tls: encrypts connections; None speaks plain HTTP.
    """
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    config.load()
    config.ssl = None if tls is None else tls.context
    # From here on connections wait in the backlog until uvicorn accepts them, so that clients
    # can connect as soon as on_listening is called.
    listener.listen(config.backlog)
    on_listening()
    loop.remove_signal_handler(signal.SIGTERM)
    if on_hangup is not None and hasattr(signal, "SIGHUP"):  # not on Windows
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    # uvicorn raises the signal that stopped it again when it is done.
    signal.signal(signal.SIGTERM, _exit)
    await uvicorn.Server(config).serve(sockets=[listener])


def cancel_on_termination() -> None:
    """Have SIGTERM cancel the current task, until ``answer_until_stopped`` listens."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


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
    from midfill.server.tracing import RequestTraces

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
