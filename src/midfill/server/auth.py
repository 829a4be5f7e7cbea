"""API keys: who may ask, and whose cache they use."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from midfill.server.errors import ApiError


def tenant_check(api_keys: tuple[str, ...]) -> Callable[[Request], Awaitable[str]]:
    """A FastAPI dependency that returns the caller's tenant.

    Without keys everybody is the tenant "". With keys, each key is a tenant, named by a digest
    so that no log or message holds the key.
    """
    tenants = [(key.encode(), hashlib.sha256(key.encode()).hexdigest()[:16]) for key in api_keys]

    async def tenant_of(request: Request) -> str:
        if not tenants:
            return ""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        found: str | None = None
        for key, tenant in tenants:  # all of them, so that time tells nothing
            if hmac.compare_digest(key, given.strip().encode()) and scheme.lower() == "bearer":
                found = tenant
        if found is None:
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return found

    return tenant_of
