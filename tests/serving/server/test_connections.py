"""Connections: how many, how slow; a real server of uvicorn's with an application of its own."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trustme
import uvicorn
from processes import bound_socket
from starlette.types import Receive, Scope, Send

from midfill.serving.options import ListenOptions
from midfill.serving.server.connections import (
    ACCEPTED_AT_ONCE,
    MAX_EXCESS,
    LimitedConnection,
    limited_protocol,
)
from midfill.serving.server.metrics import ConnectionCounts

TIMEOUT = 0.3
Test = Callable[["Serving"], Awaitable[None]]


class Serving:
    """A server whose application answers with as many bytes as the path says, in pieces."""

    def __init__(self, port: int, counts: ConnectionCounts) -> None:
        self.port = port
        self.counts = counts
        self.begun = self.in_progress = 0
        self.hold = asyncio.Event()
        self.connections: set[LimitedConnection] = set()

    async def connect(
        self, limit: int = 1 << 22
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect with a small buffer, so that the server sees soon that nothing is read."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=client, limit=limit)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        self.in_progress += 1
        try:
            if scope["path"] == "/unread":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"unread"})
                return
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                return
            if scope["path"] == "/hold":
                await self.hold.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(int(scope["query_string"] or 1)):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.in_progress -= 1


def serve(
    test: Test,
    max_connections: int = 8,
    timeout: float = TIMEOUT,
    keep_alive: int = 5,
    tls: ssl.SSLContext | None = None,
) -> None:
    async def run() -> None:
        counts = ConnectionCounts()
        limits = ListenOptions(max_connections=max_connections, client_timeout=timeout)
        serving = Serving(0, counts)
        config = uvicorn.Config(
            serving.app, backlog=ACCEPTED_AT_ONCE, log_config=None, access_log=False,
            lifespan="off", interface="asgi3", http=limited_protocol(limits, counts, tls),
            timeout_keep_alive=keep_alive,
        )  # fmt: skip
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        listening = bound_socket()
        await server.startup([listening])
        listening.listen(2048)
        serving.connections = server.server_state.connections  # type: ignore[assignment]
        serving.port = listening.getsockname()[1]
        try:
            async with asyncio.timeout(120):
                await test(serving)
        finally:
            serving.hold.set()
            server.force_exit = True
            await server.shutdown()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def error_of(reader: asyncio.StreamReader) -> tuple[int, str, dict[str, str]]:
    """Return an answer's status, its error's code, and its headers."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), json.loads(body)["error"]["code"], headers


GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_client_that_never_sends_a_request_is_disconnected() -> None:
    async def test(serving: Serving) -> None:
        reader, _ = await serving.connect()
        assert await reader.read() == b""

    serve(test)


@pytest.mark.parametrize(
    "part",
    [
        b"GET / HTTP/1.1\r\nHost:",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_a_request_that_takes_too_long_to_arrive_is_refused(part: bytes) -> None:
    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect()
        for number in range(len(part)):  # each byte alone, which gains no time
            writer.write(part[number : number + 1])
            await asyncio.sleep(0)
        assert (await error_of(reader))[:2] == (408, "request_timeout")
        await until(lambda: serving.in_progress == 0 and serving.counts.open == 0)
        assert serving.counts.timed_out == 1

    serve(test)


def test_a_second_request_on_a_connection_has_its_own_time() -> None:
    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect()
        for _ in range(3):
            writer.write(GET % b"/")
            await reader.readuntil(b"0\r\n\r\n")
            await asyncio.sleep(TIMEOUT * 0.5)
        writer.write(b"GET / HT")
        assert (await error_of(reader))[:2] == (408, "request_timeout")

    serve(test)


def test_a_long_answer_has_all_the_time_that_it_needs() -> None:
    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect()
        writer.write(GET % b"/hold")
        await asyncio.sleep(TIMEOUT * 3)
        serving.hold.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert serving.counts.timed_out == 0

    serve(test)


def test_a_request_with_an_endless_head_is_refused() -> None:
    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect()
        writer.write(b"GET / HTTP/1.1\r\n")
        for number in range(3000):
            writer.write(b"x-%d: %b\r\n" % (number, b"y" * 30))
        status, code, _ = await error_of(reader)
        assert (status, code) == (431, "request_head_too_large")

    serve(test, timeout=0)


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async def test(serving: Serving) -> None:
        # The system's buffers may hold megabytes of what nobody reads.
        reader, writer = await serving.connect(limit=1 << 26)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET % b"/?1000")
        await until(lambda: serving.begun == 1)
        await until(lambda: serving.in_progress == 0 and serving.counts.open == 0)
        assert serving.counts.timed_out == 1
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"0\r\n\r\n")

    serve(test)


def test_a_client_that_reads_slowly_gets_all_of_its_answer() -> None:
    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect(limit=1 << 16)
        writer.write(GET % b"/?100")
        received = b""
        while not received.endswith(b"x\r\n0\r\n\r\n"):
            part = await reader.read(1 << 18)
            assert part
            received += part
            # Altogether for longer than it may read nothing.
            await asyncio.sleep(0.1)
        assert len(received) > 100 * 65536
        assert serving.counts.timed_out == 0

    serve(test, timeout=4)


def test_idle_connections_make_room_for_new_ones() -> None:
    async def test(serving: Serving) -> None:
        idle = [await serving.connect() for _ in range(8)]
        await until(lambda: serving.counts.open == 8)
        busy, busy_writer = idle[1]
        busy_writer.write(GET % b"/hold")
        await until(lambda: serving.in_progress == 1)
        reader, writer = await serving.connect()
        writer.write(GET % b"/")
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):  # the one that had been idle longest
            assert await idle[0][0].read() == b""
        serving.hold.set()
        assert (await busy.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert serving.counts.evicted == 1

    serve(test, timeout=0)


def test_where_all_are_busy_a_new_one_is_told_to_try_again() -> None:
    async def test(serving: Serving) -> None:
        busy = [await serving.connect() for _ in range(8)]
        for _, writer in busy:
            writer.write(GET % b"/hold")
        await until(lambda: serving.in_progress == 8)
        reader, writer = await serving.connect()
        writer.write(GET % b"/")
        status, code, headers = await error_of(reader)
        assert (status, code) == (503, "too_many_connections")
        assert int(headers["retry-after"]) >= 1
        serving.hold.set()
        for reader, _ in busy:
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        reader, writer = await serving.connect()
        writer.write(GET % b"/")
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")

    serve(test, timeout=0)


def test_an_answer_may_come_before_the_rest_of_its_request() -> None:
    """The rest is thrown away, the connection is used again, and closed where it is not."""
    head = b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n"

    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect()
        for _ in range(2):
            writer.write(head + b"x" * 100)
            assert b"unread" in await reader.readuntil(b"0\r\n\r\n")
            writer.write(b"x" * 100_000)
            await writer.drain()
            writer.write(b"x" * 99_900)
            await writer.drain()
        assert serving.begun == 2
        assert await reader.read() == b""  # closed
        writer.close()

    serve(test, timeout=60, keep_alive=1)


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's TLS context, and one of a client that trusts it."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    return server, client


async def ask_encrypted(serving: Serving, client: ssl.SSLContext) -> bytes:
    """Return the answer's first line; the request comes with the handshake's last message."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", serving.port, ssl=client, server_hostname="localhost"
    )
    writer.write(GET % b"/")
    line = await reader.readline()
    writer.close()
    return line


def test_connections_count_before_their_handshake(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """They make room for those that go on, and nobody else has to wait for them."""

    async def test(serving: Serving) -> None:
        silent = [await serving.connect() for _ in range(12)]
        await until(lambda: serving.counts.evicted == 4)
        assert serving.counts.open == 8
        assert (await ask_encrypted(serving, contexts[1])).startswith(b"HTTP/1.1 200")
        for reader, _ in silent[:5]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        assert serving.counts.refused == 0

    serve(test, timeout=60, tls=contexts[0])


@pytest.mark.parametrize("sent", [b"", b"no handshake at all\r\n\r\n", b"\x16\x03\x01"])
def test_a_handshake_that_fails_or_takes_too_long_leaves_nothing(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sent: bytes
) -> None:
    async def test(serving: Serving) -> None:
        connections = [await serving.connect() for _ in range(3)]
        for _, writer in connections:
            writer.write(sent)
        connections[0][1].close()
        await until(lambda: serving.counts.open == 0)
        assert (await ask_encrypted(serving, contexts[1])).startswith(b"HTTP/1.1 200")
        await until(lambda: serving.counts.open == 0)

    serve(test, tls=contexts[0])


def test_a_burst_exceeds_the_maximum_by_no_more_than_is_reserved() -> None:
    """Open files are counted, also of connections that asyncio has just accepted."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("open files are counted on Linux")
    most = 8

    async def test(serving: Serving) -> None:
        before, peak = len(list(folder.iterdir())), 0
        clients: list[socket.socket] = []
        for _ in range(40):
            for _ in range(25):
                client = socket.socket()
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(("127.0.0.1", serving.port))
                clients.append(client)
            await asyncio.sleep(0)
            peak = max(peak, len(list(folder.iterdir())) - before - len(clients))
        await until(lambda: serving.counts.evicted == len(clients) - most)
        assert serving.counts.open == most
        assert peak <= most + MAX_EXCESS
        for client in clients:
            client.close()

    serve(test, max_connections=most, timeout=60)


def test_requests_that_wait_for_earlier_answers_are_bounded() -> None:
    """Those beyond are not answered; the last answer says that the connection ends."""

    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect()
        writer.write(GET % b"/hold" + GET % b"/" * 2000)
        await until(lambda: serving.in_progress == 1)
        (connection,) = serving.connections
        assert len(connection.pipeline) == 8
        serving.hold.set()
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200") == 9
        assert answers.count(b"connection: close") == 1
        assert serving.begun == 9

    serve(test, timeout=60)


def test_a_few_requests_at_once_are_all_answered() -> None:
    async def test(serving: Serving) -> None:
        reader, writer = await serving.connect()
        writer.write(GET % b"/" * 9)
        for _ in range(9):
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")

    serve(test, timeout=60)
