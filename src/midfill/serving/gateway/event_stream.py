"""Server-sent events as they arrive over HTTP."""

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import msgspec

from midfill.serving.gateway.calls import UpstreamFailedError

_MAX_BYTES = 4_000_000  # of one line
_DONE = b"[DONE]"
_FIELD = b"data:"
_ERROR = b"error:"  # some versions of llama.cpp


async def read_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of a stream of server-sent events, until it ends.

    Raises:
        UpstreamFailedError: an event is no JSON object, or is endless.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_BYTES:
            raise UpstreamFailedError("sent an endless line")
        for line in lines:
            event = _event(line.strip())
            if event is not None:
                yield event
    event = _event(rest.strip())
    if event is not None:
        yield event


def _event(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds; None if it is a comment, another field, or the end's mark."""
    if line.startswith(_ERROR):
        return {"error": _decode(line.removeprefix(_ERROR))}
    if not line.startswith(_FIELD):
        if line and b":" not in line:
            raise UpstreamFailedError("sent a line that is no event in a stream of events")
        return None
    data = line.removeprefix(_FIELD).strip()
    if data == _DONE or not data:
        return None
    value = _decode(data)
    if not isinstance(value, dict):
        raise UpstreamFailedError("sent an event that is no JSON object")
    return value


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UpstreamFailedError("sent an event that is no JSON") from None
