"""Listening: from an address to an application that answers there until it is interrupted.

With TLS, the certificate is read from files, and again while the server runs.
"""

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from starlette.types import ASGIApp

from midfill.errors import MidfillError
from midfill.serving.options import FrontendOptions, ListenOptions, TlsFiles
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.connections import ACCEPTED_AT_ONCE, MAX_EXCESS, limited_protocol
from midfill.serving.server.metrics import ConnectionCounts
from midfill.serving.server.service import Monitored
from midfill.system.extras import require
from midfill.system.process import (
    freeze_objects,
    raise_open_file_limit,
    return_large_blocks,
)

if TYPE_CHECKING:  # needs an extra
    from midfill.serving.server.tracing import RequestTraces

_log = logging.getLogger(__name__)
_LAST_WORDS_SECONDS = 2  # for the errors of requests that the server's end has ended
_PROXIES_VARIABLE = "FORWARDED_ALLOW_IPS"  # uvicorn's
_SET_TLS = "set --ssl-certfile and --ssl-keyfile, or listen on 127.0.0.1 behind a proxy with TLS"
_BACKLOG = 2048  # connections that wait to be accepted
_OTHER_FILES = 128 + MAX_EXCESS  # that the process may have open beside connections
_LOOP = asyncio.SelectorEventLoop if sys.platform == "win32" else None
"""The event loop: ZeroMQ's sockets can't be awaited in Windows' own default."""


class ServerTls:
    """The TLS context of a server.

    Attributes:
        context: for connections; new ones use what was read last.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            MidfillError: one can't be read, or they don't fit together.
        """
        self._files = files
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_certificate(self.context)
        if files.client_authorities is not None:
            self._load_authorities(files.client_authorities)
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Read certificate and key again; if they can't be used, they stay, and a line says so.

        Connections in progress go on.
        """
        try:
            # On trial first: a context whose loading fails half-way can't be used any more.
            self._load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load_certificate(self.context)
        except MidfillError as error:
            _log.error("the TLS certificate stays as it was: %s", error)
        else:
            _log.warning("the TLS certificate was read again")

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        files = self._files
        for path in (files.certificate, files.key):
            if path is not None:
                _check_readable(path)
        try:
            context.load_cert_chain(files.certificate, files.key, password=self._refuse_password)
        except ssl.SSLError as error:
            where = files.key or files.certificate
            raise MidfillError(
                f"{files.certificate}: can't be used with the key of {where}: {_ssl_reason(error)};"
                " --ssl-certfile takes a certificate chain and --ssl-keyfile its private key, both"
                " in PEM"
            ) from None

    def _load_authorities(self, path: Path) -> None:
        _check_readable(path)
        try:
            self.context.load_verify_locations(path)
        except ssl.SSLError as error:
            raise MidfillError(
                f"{path}: --ssl-ca-certs takes certificates in PEM ({_ssl_reason(error)})"
            ) from None

    def _refuse_password(self) -> NoReturn:
        where = self._files.key or self._files.certificate
        raise MidfillError(
            f"{where}: the private key is encrypted; decrypt it (openssl pkey -in KEY -out PLAIN)"
        )


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise MidfillError(f"{path}: can't be read: {error.strerror or error}") from None


def _ssl_reason(error: ssl.SSLError) -> str:
    return (error.reason or "no certificate in it").replace("_", " ").lower()


@dataclass(frozen=True)
class Listener:
    """Where a server listens, and to whom.

    Attributes:
        options: what its operator has chosen.
        socket: bound to the address.
        keys: who may send requests.
        tls: encrypts connections; None speaks plain HTTP.
        traces: where traces of requests go; None makes none.
    """

    options: FrontendOptions
    socket: socket.socket
    keys: KeyRing
    tls: ServerTls | None = None
    traces: "RequestTraces | None" = None

    @property
    def url(self) -> str:
        """The URL that clients on this machine reach it by."""
        host, port = self.socket.getsockname()[:2]
        any_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        host = any_host.get(host, f"[{host}]" if ":" in host else host)
        return f"{'http' if self.tls is None else 'https'}://{host}:{port}"

    @property
    def own_hosts(self) -> tuple[str, ...] | None:
        """The names that it answers under, beside its machine's own; None: any.

        With keys, who asks is known, so names don't matter.
        """
        if self.keys or not self._is_loopback:
            return None
        return (self.options.host, *self.options.allowed_hosts)

    @property
    def _is_loopback(self) -> bool:
        return is_loopback(self.socket)

    def warn_if_open(self) -> None:
        """Log warnings if other machines can connect and need no key, or send it unencrypted."""
        if not self._is_loopback:
            warn_of_others(
                self.options.host, has_keys=bool(self.keys), has_tls=self.tls is not None
            )

    def reload(self) -> None:
        """Read keys and certificate again; see ``KeyRing.reload`` and ``ServerTls.reload``."""
        self.keys.reload()
        if self.tls is not None:
            self.tls.reload()


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can connect to a socket."""
    host = bound.getsockname()[0].partition("%")[0]  # without an IPv6 zone
    return ipaddress.ip_address(host).is_loopback


def warn_of_others(host: str, *, has_keys: bool, has_tls: bool, tls_advice: str = _SET_TLS) -> None:
    """Log what other machines can do with a server that they can reach.

    Args:
        host: where it listens.
        has_keys, has_tls: whether it needs keys, and is encrypted.
        tls_advice: how it could be.
    """
    if not has_keys:
        _log.warning(
            "other machines can use the model: the server listens on %s and needs no API key;"
            " set --api-key, --api-key-file or MIDFILL_API_KEY, or listen on 127.0.0.1",
            host,
        )
    if not has_tls:
        _log.warning(
            "texts and keys travel unencrypted: the server listens on %s without TLS; %s",
            host, tls_advice,
        )  # fmt: skip


def listen(
    options: FrontendOptions, serve: Callable[[Listener], Coroutine[Any, Any, None]]
) -> None:
    """Bind to the address, and serve there until interrupted.

    Args:
        options: where, and to whom.
        serve: loads what answers, and calls ``answer_until_stopped``. SIGTERM cancels it until
            then.

    Raises:
        MidfillError: the address, the key file or the certificate can't be used, or libraries that
            the options need are not installed.
    """
    keys = KeyRing(options.api_keys, options.api_key_file)
    tls = None if options.tls is None else ServerTls(options.tls)

    async def served(listener: Listener) -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def end(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(task.cancel)

        # Not the loop's own handler: a signal that the loop has not seen when such a handler is
        # replaced is lost.
        signal.signal(signal.SIGTERM, end)
        _at_hangup(listener.reload)  # until it has loaded
        await serve(listener)

    with (
        bind(options.host, options.port) as bound,
        _open_traces(options.otlp_traces_endpoint) as traces,
    ):
        listener = Listener(options, bound, keys, tls, traces)
        listener.warn_if_open()
        try:
            with asyncio.Runner(loop_factory=_LOOP) as runner:
                runner.run(served(listener))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)


async def answer_until_stopped(
    app: ASGIApp,
    listener: Listener,
    service: Monitored,
    on_listening: Callable[[], None],
    on_hangup: Callable[[], None] = lambda: None,
    options: ListenOptions | None = None,
) -> None:
    """Serve an application until the process is interrupted.

    Then no connections are accepted any more, and answers in progress may end. Those that take too
    long fail as requests do whose engine has died: the client may try again.

    Args:
        app: what answers.
        listener: where.
        service: the application's model, or models.
        on_listening: called once clients can connect.
        on_hangup: called at each SIGHUP, once keys and certificate were read again.
        options: bounds; None takes the defaults.
    """
    options = options or ListenOptions()
    counts = ConnectionCounts()
    service.metrics.add(counts.metrics)
    most = _supported_connections(options.max_connections)
    tls = None if listener.tls is None else listener.tls.context
    config = server_config(
        app,
        http=limited_protocol(replace(options, max_connections=most), counts, tls),
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=math.ceil(options.drain_timeout) + _LAST_WORDS_SECONDS,
    )
    # From here on connections wait in the backlog until uvicorn accepts them, so that clients
    # can connect as soon as on_listening is called.
    listener.socket.listen(_BACKLOG)
    return_large_blocks()
    freeze_objects()
    on_listening()

    def reload() -> None:
        listener.reload()
        on_hangup()

    _at_hangup(reload)
    # uvicorn raises the signal that stopped it again when it is done.
    signal.signal(signal.SIGTERM, _exit)
    recording = asyncio.create_task(service.history.keep(), name="recording metrics")
    try:
        await _Server(config, service, options.drain_timeout).serve(sockets=[listener.socket])
    finally:
        recording.cancel()


def _at_hangup(reload: Callable[[], None]) -> None:
    """Have the running loop call ``reload`` at each SIGHUP, instead of what was named before."""
    if hasattr(signal, "SIGHUP"):  # Windows has none
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def server_config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings, loaded.

    A client's address is its connection's. What X-Forwarded-For says instead is believed only of
    the proxies that the environment names: any program on this machine can send that header.

    Args:
        app: what answers.
        options: further settings of uvicorn's.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        proxy_headers=_PROXIES_VARIABLE in os.environ,
        **options,
    )
    config.load()
    return config


class _Server(uvicorn.Server):
    """uvicorn's server, which tells a service when its time is over, and lets many wait."""

    def __init__(self, config: uvicorn.Config, service: Monitored, seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._seconds = seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        for listening in sockets or ():  # asyncio takes one number for this and for its turns
            listening.listen(_BACKLOG)

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
        "this process may have %d files open (ulimit -n), so at most %d connections instead of"
        " --max-connections %d", files, supported, wanted,
    )  # fmt: skip
    return supported


@contextlib.contextmanager
def _open_traces(endpoint: str | None) -> "Iterator[RequestTraces | None]":
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
            if sys.platform != "win32":  # where it lets several servers have one port
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


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
