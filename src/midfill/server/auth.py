"""API keys in requests: who asks, and whose prefix cache is used."""

from collections.abc import Awaitable, Callable

from fastapi import Request

from midfill.server.errors import ApiError
from midfill.server.key_ring import KeyRing
from midfill.server.request_record import current_request


def tenant_check(keys: KeyRing) -> Callable[[Request], Awaitable[str]]:
    """Return a FastAPI dependency that gives the caller's tenant; see ``KeyRing``."""

    async def tenant_of(request: Request) -> str:
        tenant = find_tenant(request)
        record = current_request.get()
        if record is not None:
            record.tenant = tenant
        return tenant

    def find_tenant(request: Request) -> str:
        if not keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Headers are decoded as Latin-1, whatever bytes the client sent.
        tenant = keys.find_tenant(key.strip().encode("latin-1"))
        if tenant is None or scheme.lower() != "bearer":
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return tenant

    return tenant_of
