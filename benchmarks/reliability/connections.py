"""Connections: HTTP requests at the least cost to the machine that they are sent from.

A load that overloads a server on the same machine takes from it whatever it spends on itself. What
a general client does for each request costs as much as the server's refusal.
"""

import asyncio
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import httptools

_IDLE_SECONDS = 2.0  # less than the server's: a request on a connection that it closes fails


class HttpResponse(NamedTuple):
    """A response; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connections:
    """Kept connections to one server, each for one request at a time; more are made as needed.

    Args:
        url: of the server, ``http://HOST:PORT``.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ValueError(f"the URL must be http://HOST:PORT, not {url}")
        self._host, self._port = parts.hostname, parts.port
        self._idle: list[_Connection] = []  # the last one was used last

    async def __aenter__(self) -> Self:
        """Return this object."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections that are not in use."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> HttpResponse:
        """Send a request with a body of JSON and return the whole response.

        Raises:
            OSError: the connection can't be made, or ended before the response.
        """
        head = [
            f"POST {path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        connection = self._take() or await self._connect()
        try:
            response = await connection.send("\r\n".join([*head, "", ""]).encode() + body)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return response

    def _take(self) -> "_Connection | None":
        """Return a connection that is open and was used lately."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.used < _IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection


class _Connection(asyncio.Protocol):
    """One connection.

    Attributes:
        used: when its last response was complete, by the loop's clock.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: asyncio.Future[HttpResponse] | None = None
        self.used = 0.0
        self._begin()

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> HttpResponse:
        """Send a request and return its response."""
        assert self._transport is not None
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio calls these ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._response is not None and not self._response.done():
            self._response.set_exception(exc or ConnectionResetError("closed by the server"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._response is not None and not self._response.done():
                self._response.set_exception(ConnectionError(f"no HTTP: {error}"))
            self.close()

    # --- and the parser these ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        response = HttpResponse(status, self._headers, b"".join(self._body))
        self.used = asyncio.get_running_loop().time()
        self._begin()
        if self._response is not None and not self._response.done():
            self._response.set_result(response)

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
