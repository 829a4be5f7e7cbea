"""POST /internal/kv/find, export and import: KV between servers of one model.

For whoever moves documents between servers, behind a key of its own: its holder may read and write
the KV of all tenants.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse

from midfill.engine.disaggregated.client import DisaggregatedClient
from midfill.engine.process.client import EngineClient
from midfill.errors import KvTransferError
from midfill.serving.server.auth import KeyRing, client_host, sent_key
from midfill.serving.server.bodies import json_response, read_bytes, read_json
from midfill.serving.server.responses import ApiError

_MAX_JSON_BYTES = 16 * 2**20
_TOKEN = np.dtype("<i4")
_HEADER_BYTES = 64 * 2**20  # of a blob, at most, beside the KV
_PIECE_BYTES = 2**20  # of an answer: the event loop copies what it writes

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class KvFindBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a question what is cached.

    Attributes:
        token_ids: a prompt.
        tenant: whose cache; the name of the API key, "" without keys.
    """

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    tenant: str = ""


class KvExportBody(KvFindBody, forbid_unknown_fields=True):
    """Body of an export: of what is cached of a prompt, from the first token on.

    Attributes:
        start: how many of these tokens the receiver has; they are left out.
    """

    start: Annotated[int, msgspec.Meta(ge=0)] = 0


def kv_routes(engine: EngineClient | DisaggregatedClient, key: str) -> APIRouter:
    """Return the router.

    Args:
        engine: whose KV it is.
        key: what callers send as their bearer token.
    """
    router = APIRouter(dependencies=[Depends(_key_check(key))], include_in_schema=False)

    @router.post("/internal/kv/find")
    async def find(request: Request) -> Response:
        """Say how many tokens of a prompt are cached."""
        body = await read_json(request, KvFindBody, _MAX_JSON_BYTES)
        return json_response({"tokens": await engine.cached_tokens(body.tenant, body.token_ids)})

    @router.post("/internal/kv/export")
    async def export(request: Request) -> Response:
        """Answer with the KV of what is cached of a prompt, 404 if nothing is."""
        body = await read_json(request, KvExportBody, _MAX_JSON_BYTES)
        try:
            blob = await engine.export_kv(body.tenant, body.token_ids, body.start)
        except KvTransferError as error:
            raise ApiError(404, str(error), code="kv_not_cached") from None
        return StreamingResponse(
            _pieces(blob),
            headers={"content-length": str(len(blob))},
            media_type="application/octet-stream",
        )

    @router.post("/internal/kv/import")
    async def import_(
        request: Request, tenant: str = "", before: Annotated[int, Query(ge=0)] = 0
    ) -> Response:
        """Put what an export answered into a tenant's cache; say how many tokens are cached.

        The tokens that it has left out, ``before`` of them, come first, little-endian int32.
        """
        slots = 0 if engine.info is None else engine.info.slots
        if before > slots:
            raise ApiError(400, f"before is {before}, but the KV pool holds {slots} tokens")
        size = before * _TOKEN.itemsize
        head, blob = await read_bytes(request, engine.kv_bytes + _HEADER_BYTES, size)
        if size > len(head):
            raise ApiError(400, f"the body ends within the {before} tokens before the KV")
        left_out = np.frombuffer(head, _TOKEN).tolist()
        try:
            tokens = await engine.import_kv(tenant, blob, left_out)
        except KvTransferError as error:
            raise ApiError(400, str(error), code="kv_refused") from None
        return json_response({"tokens": tokens})

    return router


async def _pieces(blob: memoryview) -> AsyncIterator[bytes]:
    for start in range(0, len(blob), _PIECE_BYTES):
        yield bytes(blob[start : start + _PIECE_BYTES])


def _key_check(key: str) -> Callable[[Request], Awaitable[None]]:
    keys = KeyRing([key])

    async def check(request: Request) -> None:
        sent = sent_key(request.headers.get("authorization", ""))
        if sent is None or keys.find_name(sent, client_host(request)) is None:
            raise ApiError(
                401, "the key of --kv-transfer-key is needed: Authorization: Bearer KEY",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    return check
