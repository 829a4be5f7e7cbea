"""Answers of servers that mean harm, or are broken, as bytes on a connection."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterable

EVENTS, WHOLE = "text/event-stream", "application/json"


def head(status: int = 200, kind: str = EVENTS, **headers: object) -> bytes:
    """Return the head of an answer; underscores in names of headers are hyphens."""
    named = {"content-type": kind, **{name.replace("_", "-"): headers[name] for name in headers}}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def event(text: str, reason: str | None = None) -> bytes:
    """Return an event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def sent(*chunks: bytes, pause: float = 0.0) -> AsyncIterator[bytes]:
    """Yield chunks with a pause after each."""
    for chunk in chunks:
        yield chunk
        await asyncio.sleep(pause)


async def endless(first: bytes, again: bytes, times: int) -> AsyncIterator[bytes]:
    """Yield a chunk, and another one many times."""
    yield first
    for _ in range(times):
        yield again


def whole(body: object, **headers: object) -> bytes:
    """Return an answer of JSON in one piece."""
    data = json.dumps(body).encode()
    return head(kind=WHOLE, **{"content_length": len(data), **headers}) + data


def split(data: bytes, parts: int) -> Iterable[bytes]:
    """Return bytes in so many parts, or one byte each."""
    size = max(1, len(data) // parts)
    return (data[at : at + size] for at in range(0, len(data), size))


def bomb(kind: str, megabytes: int) -> bytes:
    """Return an answer that is small until it is decompressed."""
    data = gzip.compress(b"data: " + b" " * (megabytes << 20) + b"\n")
    return head(kind=kind, content_encoding="gzip", content_length=len(data)) + data
