"""POST /internal/kv/export and /internal/kv/import: KV between servers of one model.

For whoever moves documents between servers, behind a key of its own: its holder may read and write
the KV of all tenants.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Protocol

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import KvTransferError
from midfill.server.auth import client_host
from midfill.server.bodies import json_response, read_bytes, read_json
from midfill.server.errors import ApiError
from midfill.server.key_file import key_digest
from midfill.server.key_guesses import KeyGuesses

_MAX_JSON_BYTES = 16 * 2**20
_HEADER_BYTES = 64 * 2**20  # of a blob, at most, beside the KV

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class KvEngine(Protocol):
    """What the routes ask of an engine; see ``engine.client.EngineClient``."""

    @property
    def kv_bytes(self) -> int:
        """Size of its KV pool."""
        ...

    async def export_kv(self, tenant: str, token_ids: list[int]) -> bytes:
        """Return an encoded ``KvBlob``."""
        ...

    async def import_kv(self, tenant: str, blob: bytes) -> int:
        """Put an encoded ``KvBlob`` into a tenant's prefix cache; return the tokens cached."""
        ...


class KvExportBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of an export.

    Attributes:
        token_ids: a prompt; what is cached of it, from the first token on, is exported.
        tenant: whose cache; the name of the API key, "" without keys.
    """

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    tenant: str = ""


def kv_routes(engine: KvEngine, key: str) -> APIRouter:
    """Return the router.

    Args:
        engine: whose KV it is.
        key: what callers send as their bearer token.
    """
    router = APIRouter(dependencies=[Depends(_key_check(key))], include_in_schema=False)

    @router.post("/internal/kv/export")
    async def export(request: Request) -> Response:
        """Answer with the KV of what is cached of a prompt, 404 if nothing is."""
        body = await read_json(request, KvExportBody, _MAX_JSON_BYTES)
        try:
            blob = await engine.export_kv(body.tenant, body.token_ids)
        except KvTransferError as error:
            raise ApiError(404, str(error), code="kv_not_cached") from None
        return Response(blob, media_type="application/octet-stream")

    @router.post("/internal/kv/import")
    async def import_(request: Request, tenant: str = "") -> Response:
        """Put what an export answered into a tenant's cache; say how many tokens are cached."""
        blob = await read_bytes(request, engine.kv_bytes + _HEADER_BYTES)
        try:
            tokens = await engine.import_kv(tenant, blob)
        except KvTransferError as error:
            raise ApiError(400, str(error), code="kv_refused") from None
        return json_response({"tokens": tokens})

    return router


def _key_check(key: str) -> Callable[[Request], Awaitable[None]]:
    digest, guesses = key_digest(key.encode()), KeyGuesses()

    async def check(request: Request) -> None:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        sent, host = text.strip().encode("latin-1"), client_host(request)
        sent_digest = key_digest(sent)
        if host is not None:
            guesses.check(host, sent, sent_digest)
        right = scheme.lower() == "bearer" and hmac.compare_digest(sent_digest, digest)
        if host is not None:
            guesses.record(host, sent, sent_digest, right=right)
        if not right:
            raise ApiError(
                401, "the key of --kv-transfer-key is needed: Authorization: Bearer KEY",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    return check
