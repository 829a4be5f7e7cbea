"""Bodies: requests read up to a maximum size, decoded and described for OpenAPI; JSON responses.

The event loop does nothing whose time grows with a body: what is large is decoded on a thread of
its own, one body after the other, in steps that are each short enough not to hold up the loop,
since the interpreter runs one thread at a time. Bodies that are received and decoded share a budget
of memory.
"""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.serving.server.request import current_request
from midfill.serving.server.responses import ApiError

T = TypeVar("T")

MAX_VALUES = 1 << 18
"""Numbers, texts, arrays and objects in a body: decoding more would hold up the event loop."""

MAX_ESCAPES = 1 << 22
"""Backslashes in a body; one with a code, such as \\u00e9, takes as long as four others."""

_SMALL_BYTES = 1 << 16  # decoded at once
_decoding = ThreadPoolExecutor(1, thread_name_prefix="decoding bodies")
_MAX_FAULT = 4096  # characters of msgspec's message, which quotes names and texts of any length
_MAX_NAMED_BYTES = 1 << 20  # beyond it, the field that is not valid UTF-8 isn't looked for
_MAX_HELD_BYTES = 1 << 27
_FREE_BYTES = 1 << 16
_RETRY_SECONDS = 1
_SCHEMAS = "#/components/schemas/{name}"

# msgspec writes, for instance: Expected `int`, got `str` - at `$.stop[1]`
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?P<part>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


class HeldBodies:
    """The bodies that are held at a time.

    Where the budget is used up, the body that has grown least recently gives way to the one that
    grows, so uploads that stall hold nothing up. The first bytes of each body are free: connections
    are bounded, and requests of usual sizes are not concerned.

    Args:
        max_bytes: the budget. A body that is held alone may be larger.
        free_bytes: of each body.
    """

    def __init__(self, max_bytes: int = _MAX_HELD_BYTES, free_bytes: int = _FREE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._free_bytes = free_bytes
        self._counted_bytes = 0
        self._growing: OrderedDict[HeldBody, asyncio.Timeout] = OrderedDict()

    @contextmanager
    def body(self) -> "Iterator[HeldBody]":
        """Hold a new body for as long as the block runs."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self._release(body)

    async def receive(self, body: "HeldBody", chunks: AsyncIterator[bytes]) -> None:
        """Let a body grow; see ``HeldBody.read``."""
        async for chunk in chunks:
            body.append(chunk)
            if body.size > self._free_bytes:
                break
        else:
            return
        try:
            async with asyncio.timeout(None) as timeout:
                self._growing[body] = timeout
                self._count(body)
                async for chunk in chunks:
                    body.append(chunk)
                    self._count(body)
        except TimeoutError:
            if timeout.expired():
                raise _too_much() from None
            raise
        finally:
            self._growing.pop(body, None)

    def _count(self, body: "HeldBody") -> None:
        if body not in self._growing:  # it gave way in this turn of the event loop
            raise _too_much()
        more = max(body.size - self._free_bytes, 0) - body.counted
        body.counted += more
        self._counted_bytes += more
        self._growing.move_to_end(body)
        while self._max_bytes < self._counted_bytes != body.counted:
            oldest = next(each for each in self._growing if each.counted)
            if oldest is body:  # the others are complete
                raise _too_much()
            self._growing.pop(oldest).reschedule(asyncio.get_running_loop().time())
            self._release(oldest)

    def _release(self, body: "HeldBody") -> None:
        self._counted_bytes -= body.counted
        body.drop()


def _too_much() -> ApiError:
    return ApiError(
        503,
        "too much is being sent to this server at once; try again in a moment",
        code="too_many_bytes",
        headers={"retry-after": str(_RETRY_SECONDS)},
    )


class HeldBody:
    """One body of ``HeldBodies``.

    Attributes:
        size: bytes that have arrived.
        counted: how many of them count.
    """

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self._chunks: list[bytes] = []
        self.size = self.counted = 0

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Take all of a body as it arrives.

        Raises:
            ApiError: it had to give way, with status 503.
        """
        await self._bodies.receive(self, chunks)

    def append(self, chunk: bytes) -> None:
        """Add what has arrived."""
        self._chunks.append(chunk)
        self.size += len(chunk)

    def drop(self) -> None:
        """Hold nothing of it any more."""
        self.counted = 0
        self._chunks.clear()

    def take(self) -> bytes:
        """Return what has arrived, and hold it no more; it counts until the block ends."""
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)


_receiving = HeldBodies()


def body_reference(kind: type[msgspec.Struct]) -> dict[str, object]:
    """Return the part of an endpoint's OpenAPI entry that refers to its body's schema."""
    schema = {"$ref": _SCHEMAS.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas(kinds: Sequence[type[msgspec.Struct]]) -> dict[str, object]:
    """Return the JSON schemas of bodies and of all they contain, for OpenAPI's components."""
    _, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    return dict(components)


def json_response(value: object) -> Response:
    """Return a response of compact JSON on one line."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def read_json(
    request: Request, kind: type[T], limit: int, *, any_content_type: bool = False
) -> T:
    """Read and decode a JSON body.

    Args:
        request: a request whose body is unread.
        kind: the msgspec Struct to decode into.
        limit: maximum size in bytes; a longer body is never held in memory.
        any_content_type: accept JSON under other types, such as curl's for ``-d``, as the servers
            do that the dialect imitates. Not from web pages: a page can send these anywhere
            without asking first.

    Raises:
        ApiError: 413 for a body that is too long, 415 for one that is not JSON by its headers, 503
            where too much is being received.
        InvalidRequestError: see ``decode_json``.
    """
    _check_headers(request, any_content_type and "origin" not in request.headers)
    with _receiving.body() as body:
        await body.read(_chunks(request, limit))
        if (record := current_request.get()) is not None:
            record.body_bytes = body.size
        if body.size <= _SMALL_BYTES:
            return decode_json(body.take(), kind)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_decoding, _decode_large, body.take(), kind)


def _check_headers(request: Request, any_content_type: bool) -> None:
    content_type = request.headers.get("content-type", "")
    is_json = content_type.partition(";")[0].strip().lower() == "application/json"
    if not (is_json or any_content_type):
        raise ApiError(
            415,
            f"the body must be JSON, with the header Content-Type: application/json,"
            f" not {content_type or 'none'}",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ApiError(
            415, f"Content-Encoding {encoding} is not supported; send the body as it is",
            code="unsupported_media_type",
        )  # fmt: skip


async def read_bytes(request: Request, limit: int, first: int = 0) -> tuple[bytes, bytes]:
    """Read a body that is no JSON; return its first bytes, and all others.

    The others are put together by a thread, as they may be as many as the KV pool holds.

    Args:
        request: a request whose body is unread.
        limit: maximum size in bytes.
        first: how many bytes come first; few.

    Raises:
        ApiError: 413 for a body that is too long.
    """
    head, rest = [], []
    async for chunk in _chunks(request, limit):
        head.append(chunk[:first])
        rest.append(chunk[first:])
        first -= len(head[-1])
    return b"".join(head), await asyncio.to_thread(_join, rest)


def _join(chunks: list[bytes]) -> bytes:
    """Return chunks in one piece; they are freed here, which takes as long."""
    joined = b"".join(chunks)
    chunks.clear()
    return joined


async def _chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield a body in pieces, as it arrives; raises what ``read_bytes`` does."""
    message = f"the body is longer than the {limit} bytes that this server accepts"
    too_long = ApiError(413, message, code="request_too_large")
    declared = request.headers.get("content-length", "0")
    # The HTTP parser lets only digits pass, but possibly more of them than int() accepts.
    if len(declared) > 18 or int(declared) > limit:
        raise too_long
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_long
        yield chunk


def _decode_large(body: bytes, kind: type[T]) -> T:
    """Decode JSON as ``decode_json`` does, if it has not too many values and escapes."""
    if _holds_more_values(body, MAX_VALUES):
        raise InvalidRequestError(
            f"the body has too many values: at most {MAX_VALUES} numbers, texts, arrays and objects"
            " are accepted"
        )
    if body.count(b"\\") + 3 * body.count(b"\\u") > MAX_ESCAPES:
        raise InvalidRequestError(
            f"the body has too many escaped characters: at most {MAX_ESCAPES} are accepted, and"
            f" {MAX_ESCAPES // 4} as \\uXXXX; send others than quotes, backslashes and controls as"
            " they are, in UTF-8"
        )
    return decode_json(body, kind)


def _holds_more_values(body: bytes, most: int) -> bool:
    """Return whether JSON has more commas than ``most`` outside texts; values have one each.

    Texts with many commas are common. They are told apart by a few passes over the bytes, each of
    which takes some milliseconds.
    """
    if body.count(b",") <= most:
        return False
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 8 * most:  # two of a key, two of its text, for each comma
        return True
    return b"".join(plain.split(b'"')[::2]).count(b",") > most


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode JSON into a struct of type ``kind``, with errors that name the field.

    msgspec decodes fast but describes faults in its own notation. Python's parser is used to find
    where they are.

    Raises:
        InvalidRequestError: it is not valid JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, str(error)) from None


def _wrong_type(message: str) -> InvalidRequestError:
    """Return the error for a message of msgspec about a field of the wrong type.

    The message may quote all of a text or a name, and then says where that stood.
    """
    if len(message) > _MAX_FAULT:
        message = f"{message[: _MAX_FAULT // 2]}...{message[-_MAX_FAULT // 2 :]}"
    match = _PLACE.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").removeprefix(".")
    missing, unknown = _MISSING.match(what), _UNKNOWN.match(what)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequestError(f"{path} is missing", param=path)
    if unknown is not None:
        path = f"{path}.{unknown[1]}" if path else unknown[1]
        return InvalidRequestError(f"{path} is not a known field", param=path)
    what = what.replace("`", "").replace(" | ", " or ")
    what = what[:1].lower() + what[1:]
    if not path:
        return InvalidRequestError(f"the body has the wrong form: {what}")
    place = f"a key of {path}" if match["part"] else path
    return InvalidRequestError(f"{place}: {what}", param=path)


def _malformed(body: bytes, complaint: str) -> InvalidRequestError:
    """Return the error for bytes that are not JSON; names the field if the fault is in a value.

    Python's own parser accepts NaN, lone surrogates and, decoded with ``surrogateescape``, invalid
    UTF-8. So it returns values in which these can be found.
    """
    if not body.strip():
        return InvalidRequestError("the request has no body")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        if len(body) > _MAX_NAMED_BYTES:
            place = f"it is not valid UTF-8 at byte {error.start}"
            return InvalidRequestError(f"the body is not valid JSON: {place}")
        text = body.decode(errors="surrogateescape")
    try:
        value = json.loads(text, parse_constant=_Constant)
    except RecursionError:
        return InvalidRequestError("the body is nested too deeply")
    except ValueError as error:
        valid = text.isascii() or _is_unicode(text)
        reason = str(error) if valid else "it is not valid UTF-8"
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    for path, leaf in _leaves(value):
        place, param = path or "the body", path or None
        if isinstance(leaf, _Constant):
            reason = f"must be a finite number, not {leaf}"
        elif not isinstance(leaf, str) or _is_unicode(leaf):
            continue
        elif _is_escaped(leaf):
            reason = "holds bytes that are not valid UTF-8"
        else:
            reason = "holds half a surrogate pair; send whole Unicode characters"
        return InvalidRequestError(f"{place} {reason}", param=param)
    return InvalidRequestError(f"the body is not valid JSON: {complaint}")


class _Constant(str):
    """NaN, Infinity or -Infinity in the place of a number."""


def _leaves(value: object) -> Iterator[tuple[str, object]]:
    """Yield every scalar of a JSON value with its path, such as ``messages[0].content``.

    Keys come with the path of their object, before their values.
    """
    todo: list[tuple[str, object]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict):
            yield from ((path, key) for key in item)
            children = [(f"{path}.{key}" if path else key, child) for key, child in item.items()]
            todo += reversed(children)
        elif isinstance(item, list):
            children = [(f"{path}[{index}]", child) for index, child in enumerate(item)]
            todo += reversed(children)
        else:
            yield path, item


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_escaped(text: str) -> bool:
    """Whether its surrogates stand for undecodable bytes (PEP 383) rather than for themselves."""
    return any("\udc80" <= character <= "\udcff" for character in text)
