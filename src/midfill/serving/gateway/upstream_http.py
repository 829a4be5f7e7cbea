"""How upstreams are spoken to: requests go where they were meant to go, and answers are bounded.

What an upstream sends is a stranger's. Redirects are not followed, since a prompt and the key that
goes with it are for one address. Answers are asked for as they are and refused compressed: a few
bytes would become gigabytes. Nobody holds more of an answer than was allowed for, and one that ends
early is none.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import aiohttp
import msgspec

from midfill.serving.gateway.upstream_api import UpstreamFailedError

BROKEN = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
"""What a connection raises."""

_READ_BYTES = 2**16  # at once: what is read is parsed before anything else is done
_MAX_LINE_BYTES = 4_000_000  # of one line
_DONE = b"[DONE]"
_DATA_FIELD = b"data:"
_ERROR_FIELD = b"error:"  # some versions of llama.cpp
_IDENTITY = "identity"


def open_session(key: str | None) -> aiohttp.ClientSession:
    """Return a session for ``send``.

    Args:
        key: what the upstreams want; None sends none.
    """
    headers = {"accept-encoding": _IDENTITY}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=_READ_BYTES,
        trust_env=False,
        auto_decompress=False,
        trace_configs=[_trace_connections()],
    )


class _Attempt:
    """Whether a request was sent over a connection that an earlier one had used."""

    reused = False


def _trace_connections() -> aiohttp.TraceConfig:
    async def reuse(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if isinstance(context.trace_request_ctx, _Attempt):
            context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reuse)
    return config


async def send(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    timeout: aiohttp.ClientTimeout,
    **options: Any,
) -> aiohttp.ClientResponse:
    """Send a request, and again as long as kept connections turn out to be closed.

    Servers close connections that were idle for some seconds, llama.cpp's after five. A request
    that is being sent just then gets no answer, and its server has done nothing for it. An HTTP
    client sends only those again that change nothing, which a POST does not say of itself.
    Completions do not.

    Args:
        session: made by ``open_session``.
        method, url: what and where to.
        timeout: its ``total`` or, if it has none, all of it bounds the time to the answer's head:
            aiohttp waits for ever where an interim answer (1xx) has a long body.
        options: further ones of ``session.request``.

    Raises:
        aiohttp.ClientError: there is no answer.
        TimeoutError: there is none in time.
        UpstreamFailedError: the answer redirects, or is compressed.
    """
    seconds = timeout.total or (timeout.sock_connect or 0) + (timeout.sock_read or 0)
    while True:
        attempt = _Attempt()
        options |= {"timeout": timeout, "trace_request_ctx": attempt}
        try:
            async with asyncio.timeout(seconds or None):
                response = await session.request(method, url, allow_redirects=False, **options)
            break
        except aiohttp.ClientConnectionError as error:
            if not attempt.reused or isinstance(error, TimeoutError):
                raise
    try:
        _check_head(response)
    except UpstreamFailedError:
        response.close()
        raise
    return response


def _check_head(response: aiohttp.ClientResponse) -> None:
    if 300 <= response.status < 400:
        to = repr(response.headers.get("location", ""))[:200]
        raise UpstreamFailedError(
            f"redirects to {to} (status {response.status}), which is not followed; name the server"
            " itself with --upstream"
        )
    encoding = response.headers.get("content-encoding", _IDENTITY).strip().lower()
    if encoding != _IDENTITY:
        raise UpstreamFailedError(f"sends its answer compressed ({encoding[:40]!r}), unasked")


async def read_chunks(
    response: aiohttp.ClientResponse, timeout: aiohttp.ClientTimeout
) -> AsyncGenerator[bytes, None]:
    """Yield an answer's body as it comes.

    aiohttp's own timeout doesn't end every wait, and a connection that is closed amid a chunk of
    the wrong length is a RuntimeError to it.

    Raises:
        aiohttp.ClientError: it ends early.
        TimeoutError: nothing has come for too long.
    """
    silence = _Silence(response.content, timeout.sock_read or timeout.total or 0.0)
    try:
        while True:
            with silence:
                chunk = await response.content.readany()
            if not chunk:
                return
            yield chunk
    except RuntimeError:
        raise aiohttp.ClientPayloadError("closed") from None
    finally:
        silence.end()


class _Silence:
    """Ends a wait for more of an answer after some seconds, with one timer for all its waits."""

    def __init__(self, content: aiohttp.StreamReader, seconds: float) -> None:
        self._content = content
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(seconds, self._check) if seconds else None

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def end(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        left = self._seconds if self._since is None else self._since + self._seconds - now
        if left <= 0:
            self._content.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_later(left, self._check)


async def read_start(
    response: aiohttp.ClientResponse, timeout: aiohttp.ClientTimeout, limit: int
) -> bytes:
    """Return the first bytes of an answer, all of them if it has no more than ``limit``."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in read_chunks(response, timeout):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            break
    return b"".join(chunks)[:limit]


async def read_whole(
    response: aiohttp.ClientResponse, timeout: aiohttp.ClientTimeout, limit: int
) -> bytes:
    """Return a whole answer.

    Raises:
        aiohttp.ClientError: it ends early.
        TimeoutError: nothing has come for too long.
        UpstreamFailedError: it is longer than ``limit`` bytes.
    """
    data = await read_start(response, timeout, limit + 1)
    if len(data) > limit:
        raise UpstreamFailedError(f"sends more than {limit} bytes")
    return data


async def limited(chunks: AsyncIterable[bytes], limit: int) -> AsyncGenerator[bytes, None]:
    """Yield chunks of an answer.

    Raises:
        UpstreamFailedError: they are more than ``limit`` bytes.
    """
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise UpstreamFailedError(f"sends more than {limit} bytes, which no such answer has")
        yield chunk


async def read_data(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the data of server-sent events, until the stream ends; an error is data, too.

    Raises:
        UpstreamFailedError: a line is none of an event, or endless.
    """
    begun: list[bytes] = []  # of a line
    size = 0
    async for chunk in chunks:
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*begun, lines[0]])
            begun, size = [], 0
        for line in lines:
            if data := _data(line.strip()):
                yield data
        begun.append(rest)
        size += len(rest)
        if size > _MAX_LINE_BYTES:
            raise UpstreamFailedError("sent an endless line")
    if data := _data(b"".join(begun).strip()):
        yield data


def _data(line: bytes) -> bytes | None:
    """Return what a line holds; None if it is a comment or another field."""
    if line.startswith(_ERROR_FIELD):
        return b'{"error":' + line.removeprefix(_ERROR_FIELD) + b"}"
    if not line.startswith(_DATA_FIELD):
        if line and b":" not in line:
            raise UpstreamFailedError("sent a line that is no event in a stream of events")
        return None
    return line.removeprefix(_DATA_FIELD).strip()


def ends_stream(data: bytes) -> bool:
    """Return whether an event's data says that the stream is complete."""
    return data == _DONE


async def read_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of a stream of server-sent events, until it ends.

    Raises:
        UpstreamFailedError: an event is no JSON object, or is endless.
    """
    async for data in read_data(chunks):
        if ends_stream(data):
            continue
        value = decode(data, "sent an event that is no JSON")
        if not isinstance(value, dict):
            raise UpstreamFailedError("sent an event that is no JSON object")
        yield value


def decode(data: bytes, fault: str, kind: Any = Any) -> Any:
    """Return the value of JSON.

    Raises:
        UpstreamFailedError: it is none, or of another kind; with ``fault`` as its message.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UpstreamFailedError(fault) from None
