"""API keys: who may send requests, and whose prefix cache they use."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from midfill.server.errors import ApiError


def tenant_check(api_keys: tuple[str, ...]) -> Callable[[Request], Awaitable[str]]:
    """Return a FastAPI dependency that gives the caller's tenant.

    Without keys every caller is the tenant "". With keys, each key is a tenant, named by a digest
    so that no log or message holds the key.
    """
    digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def tenant_of(request: Request) -> str:
        if not digests:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Headers are decoded as Latin-1, whatever bytes the client sent.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # Digests have one length, and all are compared, so the time taken reveals nothing.
        matches = [hmac.compare_digest(digest, known) for known in digests]
        if not any(matches) or scheme.lower() != "bearer":
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return digest.hex()[:16]

    return tenant_of
