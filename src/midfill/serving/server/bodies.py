"""Bodies: requests read up to a maximum size, decoded and described for OpenAPI; JSON responses."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from midfill.serving.server.errors import ApiError
from midfill.serving.server.json_decoding import decode_json
from midfill.serving.server.request_record import current_request

T = TypeVar("T")

_SCHEMAS = "#/components/schemas/{name}"


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
        ApiError: 413 for a body that is too long, 415 for one that is not JSON by its headers.
        InvalidRequestError: see ``decode_json``.
    """
    _check_headers(request, any_content_type and "origin" not in request.headers)
    data = await _read(request, limit)
    if (record := current_request.get()) is not None:
        record.body_bytes = len(data)
    return decode_json(data, kind)


async def read_bytes(request: Request, limit: int) -> bytes:
    """Read a body that is no JSON.

    Args:
        request: a request whose body is unread.
        limit: maximum size in bytes.

    Raises:
        ApiError: 413 for a body that is too long.
    """
    return await _read(request, limit)


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


async def _read(request: Request, limit: int) -> bytes:
    message = f"the body is longer than the {limit} bytes that this server accepts"
    too_long = ApiError(413, message, code="request_too_large")
    declared = request.headers.get("content-length", "0")
    # The HTTP parser lets only digits pass, but possibly more of them than int() accepts.
    if len(declared) > 18 or int(declared) > limit:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_long
        chunks.append(chunk)
    return b"".join(chunks)
