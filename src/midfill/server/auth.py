"""API keys: who may send requests, and whose prefix cache they use."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request

from midfill.config import ApiKey
from midfill.server.errors import ApiError
from midfill.server.request_record import current_request


def tenant_check(api_keys: Sequence[ApiKey]) -> Callable[[Request], Awaitable[str]]:
    """Return a FastAPI dependency that gives the caller's tenant.

    Without keys every caller is the tenant "". With keys, a caller's tenant is the key's name.
    """
    digests = [hashlib.sha256(key.encode()).digest() for key, _ in api_keys]

    async def tenant_of(request: Request) -> str:
        tenant = find_tenant(request)
        record = current_request.get()
        if record is not None:
            record.tenant = tenant
        return tenant

    def find_tenant(request: Request) -> str:
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
        return api_keys[matches.index(True)].name

    return tenant_of
