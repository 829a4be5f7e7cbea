"""Connections: how many there are, and what becomes of clients that send or read too slowly.

A connection of uvicorn's that keeps these bounds:

* its number, from the moment it is accepted: beyond the maximum, the one that has been idle longest
  is closed for each new one, and requests of new ones are refused where none is idle;
* the time of the TLS handshake, which is made here: uvicorn knows nothing of a connection before;
* the size of a request's head, which no application sees before it is complete;
* the number of requests that a client sends before it has the answer to the first;
* the time in which a client sends a request, head and body;
* the time for which a client may take nothing of what is sent to it.

Each accepted connection is an open file. asyncio accepts up to ``ACCEPTED_AT_ONCE`` in a turn of
its event loop, and it takes a few turns until one that is too many is closed again: ``MAX_EXCESS``
is how many files that takes beside those of the maximum.
"""

import asyncio
import ssl
from collections.abc import Callable

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from midfill.serving.options import ListenOptions
from midfill.serving.server.metrics import ConnectionCounts
from midfill.serving.server.responses import ApiError, error_response, openai_error_body

_MAX_HEAD_BYTES = 64 * 1024
_MAX_PIPELINED = 8  # requests that wait for the answers to earlier ones
_SPARE_CONNECTIONS = 64  # beyond the maximum, to be told that there are too many
_RETRY_SECONDS = 1
_HANDSHAKE_SECONDS = 10.0
_LINGER_SECONDS = 2.0  # for a rejected client to read why, while what it sends is thrown away


ACCEPTED_AT_ONCE = 32
_TURNS = 4  # it is accepted, has a transport, is closed, and is forgotten
MAX_EXCESS = _SPARE_CONNECTIONS + _TURNS * ACCEPTED_AT_ONCE


def limited_protocol(
    limits: ListenOptions, counts: ConnectionCounts, tls: ssl.SSLContext | None = None
) -> "type[LimitedConnection]":
    """Return the class of one server's connections, to be given to uvicorn.

    Args:
        limits: their bounds.
        counts: what becomes of them.
        tls: encrypts them; None speaks plain HTTP. uvicorn gets none.
    """

    class Connection(LimitedConnection):
        _limits = limits
        _counts = counts
        _tls = tls

    Connection._idle = {}
    return Connection


class LimitedConnection(HttpToolsProtocol):
    """One connection; see the module."""

    _limits: ListenOptions
    _counts: ConnectionCounts
    _tls: ssl.SSLContext | None
    _idle: "dict[LimitedConnection, None]"  # the server's, the longest idle first

    _handshake: "asyncio.Task[None] | None" = None
    _early: list[bytes] | None = None  # what arrives before a handshake's task goes on
    _receiving: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _head_bytes: int | None = 0  # of the head that is being received; None between two
    _unsent: int = 0
    _rejected: bool = False
    _overflowing: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection if there are not too many."""
        excess = len(self.connections) + 1 - self._limits.max_connections
        if excess > 0 and not self._evict_idle():
            self._counts.refused += 1
            if excess > _SPARE_CONNECTIONS:
                transport.abort()
                return
            self.app = _refuse
        self.transport = transport
        self.connections.add(self)
        self._counts.open = len(self.connections)
        self._idle[self] = None
        if self._tls is None:
            self._begin(transport)
        else:
            self._early = []
            self._handshake = self.loop.create_task(self._encrypt(transport, self._tls))

    async def _encrypt(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Make the TLS handshake, and begin."""
        seconds = min(_HANDSHAKE_SECONDS, self._limits.client_timeout or _HANDSHAKE_SECONDS)
        try:
            encrypted = await self.loop.start_tls(
                transport, self, tls, server_side=True,
                ssl_handshake_timeout=seconds, ssl_shutdown_timeout=_LINGER_SECONDS,
            )  # fmt: skip
        except (OSError, RuntimeError) as error:  # of ssl, too; the second if it was lost
            self._counts.timed_out += isinstance(error, ConnectionAbortedError)
            encrypted = None
        finally:
            self._handshake = None
        early, self._early = self._early, None
        if encrypted is None or early is None or transport.is_closing():
            transport.abort()
            self._forget()
            return
        self._begin(encrypted)
        for data in early:
            self.data_received(data)

    def _begin(self, transport: asyncio.Transport) -> None:
        """Have requests received."""
        super().connection_made(transport)
        self._receiving = self._after_timeout(self._end_receiving)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._early is not None:  # before the handshake's task goes on
            self._early = None
            return
        if self.flow is not None:  # else it was not let in
            super().connection_lost(exc)
        self._forget()

    def _forget(self) -> None:
        self.connections.discard(self)
        self._idle.pop(self, None)
        self._counts.open = len(self.connections)
        self._cancel_receiving()
        self._cancel_sending()

    def shutdown(self) -> None:
        """End the connection, or have it end with the answer in progress."""
        if self._handshake is not None:
            self.transport.abort()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        if self._early is not None:
            self._early.append(data)
            return
        if self._rejected:
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if (self._head_bytes or 0) > _MAX_HEAD_BYTES:
            self._reject(431, "the request's head is longer than 64 KiB", "request_head_too_large")

    def on_message_begin(self) -> None:
        """Begin to count a request's head and time."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            # The last one that waits is the connection's last; others may be sent again.
            self.pipeline[0][0].keep_alive = False
            self._overflowing = self._rejected = True
            return
        super().on_message_begin()
        if self._head_bytes is None:  # of a connection's first, the count has begun
            self._head_bytes = 1
        if self._receiving is None:
            self._receiving = self._after_timeout(self._end_receiving)

    def on_url(self, url: bytes) -> None:
        """Take a part of a request's URL."""
        if not self._overflowing:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if not self._overflowing:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        if self._overflowing:
            return
        self._head_bytes = None
        super().on_headers_complete()
        self._idle.pop(self, None)

    def on_body(self, body: bytes) -> None:
        """Take a part of a request's body."""
        if not self._overflowing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the whole request has been received."""
        if self._overflowing:
            return
        self._cancel_receiving()
        super().on_message_complete()
        if self.is_idle and self.timeout_keep_alive_task is None:
            # It was answered before its end, and what came after that has stopped the timer.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Note that the whole response has been handed to the transport."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()
        elif self.is_idle:
            self._idle[self] = None

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was not used again."""
        super().timeout_keep_alive_handler()
        self._await_reader()

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than the answer is written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        super().resume_writing()
        self._cancel_sending()

    # --- what happens after a timeout ---

    def _end_receiving(self) -> None:
        """End a request that the client takes too long to send."""
        self._receiving = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is not the client that is slow
            self._receiving = self._after_timeout(self._end_receiving)
            return
        if self._head_bytes == 0:  # it never began to send one
            self.transport.close()
            return
        seconds = self._limits.client_timeout
        self._reject(408, f"the request did not arrive within {seconds:g} s", "request_timeout")

    def _await_reader(self) -> None:
        """Disconnect the client if it takes nothing for too long."""
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent and self._sending is None:
            self._sending = self._after_timeout(self._end_sending)

    def _end_sending(self) -> None:
        self._sending = None
        if 0 < self._unsent <= self.transport.get_write_buffer_size():
            self._counts.timed_out += 1
            self.transport.abort()
        else:
            self._await_reader()

    def _reject(self, status: int, message: str, code: str) -> None:
        """Answer a request that is not complete with an error, and close the connection."""
        if self._rejected or self.transport.is_closing():
            return
        self._rejected = True
        self._idle[self] = None
        self._counts.timed_out += status == 408
        in_head = self._head_bytes is not None
        if self.is_idle if in_head else not self.cycle.response_started:
            body = msgspec.json.encode(openai_error_body(ApiError(status, message, code=code)))
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            # Closed with data unread, the connection would be reset, and the answer lost.
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()
            self._await_reader()

    def _cancel_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _cancel_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _after_timeout(self, function: Callable[[], None]) -> asyncio.TimerHandle | None:
        seconds = self._limits.client_timeout
        return self.loop.call_later(seconds, function) if seconds else None

    def _evict_idle(self) -> bool:
        """Close the connection that has been idle longest; return whether there is one."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        oldest.transport.abort()
        oldest._forget()
        self._counts.evicted += 1
        return True


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer any request with 503 (ASGI)."""
    error = ApiError(
        503,
        "too many connections are open; try again in a moment",
        code="too_many_connections",
        headers={"retry-after": str(_RETRY_SECONDS), "connection": "close"},
    )
    await error_response(error)(scope, receive, send)
