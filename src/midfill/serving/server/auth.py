"""API keys in requests: who asks, whose prefix cache is used, and who may see metrics."""

import base64
import binascii
from collections.abc import Awaitable, Callable

from fastapi import Request

from midfill.serving.server.errors import ApiError
from midfill.serving.server.key_ring import KeyRing
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.request_record import current_request

_BEARER = "Bearer"
_BASIC = 'Basic realm="midfill", charset="UTF-8"'  # browsers ask their user


def tenant_check(
    keys: KeyRing, limits: RateLimits | None = None
) -> Callable[[Request], Awaitable[str]]:
    """Return a FastAPI dependency that gives the caller's tenant; see ``KeyRing``.

    Args:
        keys: who may send requests.
        limits: counts each POST request; None counts none.
    """

    async def tenant_of(request: Request) -> str:
        tenant = find_tenant(request, keys)
        if limits is not None and request.method == "POST":
            limits.count_request(tenant)
        return tenant

    return tenant_of


def find_tenant(request: Request, keys: KeyRing) -> str:
    """Return the caller's tenant, and note it in the request's record.

    Raises:
        ApiError: 401 without a valid key, 403 for one that only reads metrics.
        RateLimitError: too many wrong ones have come from the client's address.
    """
    record = current_request.get()
    known = None if record is None else record.tenant  # a wrong key counts as one guess
    tenant = _find_name(request, keys, basic=False) if known is None else known
    if keys.is_monitor(tenant):
        raise ApiError(403, "this API key only reads metrics", code="insufficient_permissions")
    return tenant


def monitor_check(keys: KeyRing) -> Callable[[Request], Awaitable[None]]:
    """Return a FastAPI dependency for what shows metrics or describes the API.

    Any key will do or, if there are monitors' keys, these alone. Browsers may send it as the
    password of HTTP's Basic authentication, with any user name.
    """

    async def check(request: Request) -> None:
        name = _find_name(request, keys, basic=True)
        if keys.has_monitors and not keys.is_monitor(name):
            raise ApiError(
                403, "this API key doesn't read metrics; a monitor's does",
                code="insufficient_permissions",
            )  # fmt: skip

    return check


def _find_name(request: Request, keys: KeyRing, *, basic: bool) -> str:
    """Return the name of the caller's key, and note it in the request's record.

    Raises:
        ApiError: 401 without a valid key.
        RateLimitError: too many wrong ones have come from the client's address.
    """
    name: str | None = ""
    if keys:
        key = _sent_key(request.headers.get("authorization", ""), basic=basic)
        name = None if key is None else keys.find_name(key, client_host(request))
    if name is None:
        hint = ", or as a Basic password" if basic else ""
        raise ApiError(
            401, f"a valid API key is needed: Authorization: Bearer KEY{hint}",
            code="invalid_api_key",
            headers={"www-authenticate": f"{_BASIC}, {_BEARER}" if basic else _BEARER},
        )  # fmt: skip
    record = current_request.get()
    if record is not None:
        record.tenant = name
    return name


def client_host(request: Request) -> str | None:
    """Return a client's address; None if it has none, as on a Unix socket."""
    return None if request.client is None else request.client.host


def _sent_key(header: str, *, basic: bool) -> bytes | None:
    """Return the key of an Authorization header; None if it holds none."""
    # Headers are decoded as Latin-1, whatever bytes the client sent. As text, the last byte of a
    # key in UTF-8 could be a blank.
    name, _, value = header.encode("latin-1").partition(b" ")
    scheme, sent = name.lower(), value.strip(b" \t")
    if scheme == b"bearer":
        return sent
    if scheme != b"basic" or not basic:
        return None
    try:
        return base64.b64decode(sent, validate=True).partition(b":")[2]
    except binascii.Error:
        return None
