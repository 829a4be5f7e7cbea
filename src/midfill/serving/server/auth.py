"""API keys: which are valid now, who asks, whose prefix cache is used, and who may see metrics."""

import base64
import binascii
import hmac
import ipaddress
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from midfill.errors import MidfillError, RateLimitError
from midfill.serving.server.key_file import (
    EVERYONE,
    ApiKey,
    KeyFile,
    digest_line,
    key_digest,
    read_key_file,
)
from midfill.serving.server.limits import NO_LIMITS, RateLimits, TenantLimits
from midfill.serving.server.request import current_request
from midfill.serving.server.responses import ApiError

_log = logging.getLogger(__name__)
MAX_GUESSES = 10
"""Different wrong keys that an address may send at once."""

GUESS_SECONDS = 6.0
"""Time after which it may send one more."""

_MAX_ADDRESSES = 4096
_MAX_KEYS = 64  # of an address that are remembered; right and wrong ones
_DIGEST_BYTES = 8  # of each
_MADE_KEY = re.compile(rb"mf-[A-Za-z0-9_-]{43}")
_NETWORK_BITS = 64  # of an IPv6 address; who has one has the whole network
_BEARER = "Bearer"
_BASIC = 'Basic realm="midfill", charset="UTF-8"'  # browsers ask their user


class KeyRing:
    """Who may send requests. Without any key everybody may, as the tenant "".

    Keys that are given by themselves name their tenants "key-1", "key-2" and so on: a name tells
    nothing of its key. Those of a file, or given as a line of one, have names there.
    """

    def __init__(self, keys: Sequence[str] = (), path: Path | None = None) -> None:
        """Read the keys.

        Args:
            keys: keys without a file, or lines ``NAME:sha256:DIGEST``.
            path: a file of keys; None is none.

        Raises:
            MidfillError: the file can't be used.
        """
        self._path = path
        self._guesses = KeyGuesses()
        self._own = tuple(
            digest_line(key) or ApiKey(f"key-{number}", key_digest(key.encode()))
            for number, key in enumerate(keys, 1)
        )
        self._numbered = {f"key-{number}" for number in range(1, len(keys) + 1)}
        self._use(self._read())

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._keys)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of everybody who may send requests now."""
        names = dict.fromkeys(key.name for key in self._keys if not self.is_monitor(key.name))
        return tuple(names) or ("",)

    def find_name(self, key: bytes, host: str | None = None) -> str | None:
        """Return whose key it is, a tenant's or a monitor's; None if it is nobody's.

        Args:
            key: what a client has sent.
            host: its address; None doesn't count its wrong keys.

        Raises:
            RateLimitError: too many wrong ones have come from there, see ``KeyGuesses``.
        """
        digest = key_digest(key)
        if host is None:
            return self._find(digest)
        self._guesses.check(host, key, digest)
        name = self._find(digest)
        self._guesses.record(host, key, digest, right=name is not None)
        return name

    def _find(self, digest: bytes) -> str | None:
        # Digests have one length, and all are compared, so the time taken reveals nothing.
        matches = [hmac.compare_digest(digest, known.digest) for known in self._keys]
        return self._keys[matches.index(True)].name if any(matches) else None

    def identity(self, tenant: str) -> bytes:
        """Return what names a tenant at later starts, too.

        That is its name, or the digest of its key where the name tells only the key's place.
        """
        own = next((key for key in self._own if key.name == tenant), None)
        return tenant.encode() if own is None or tenant not in self._numbered else own.digest

    def is_monitor(self, name: str) -> bool:
        """Whether a name's keys only read metrics."""
        return name in self._file.monitors

    @property
    def has_monitors(self) -> bool:
        """Whether metrics are for monitors alone; without any, they are for all keys."""
        return bool(self._file.monitors)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return what a tenant may do now."""
        limits = self._file.limits
        return limits.get(tenant) or limits.get(EVERYONE, NO_LIMITS)

    def reload(self) -> None:
        """Read the file again; if it can't be used, the keys stay as they were, and a line says so.

        Requests in progress go on.
        """
        if self._path is None:
            return
        try:
            self._use(self._read())
        except MidfillError as error:
            _log.error("the API keys stay as they were: %s", error)
        else:
            names = ", ".join(dict.fromkeys(key.name for key in self._keys))
            _log.warning("%d API keys are valid now, of %s", len(self._keys), names)

    def _read(self) -> KeyFile:
        file = KeyFile() if self._path is None else read_key_file(self._path)
        for name in sorted(file.monitors):
            if any(key.name == name for key in self._own):
                raise MidfillError(f"{self._path}: {name} is a monitor, but --api-key has it, too")
        if file.keys and not self._own and all(key.name in file.monitors for key in file.keys):
            raise MidfillError(
                f"{self._path}: has keys of monitors only, so nobody could send a request"
            )
        return file

    def _use(self, file: KeyFile) -> None:
        self._file = file
        self._keys = self._own + file.keys


@dataclass(slots=True)
class _Address:
    """What an address has sent: digests of its keys, the last one last, and what it may guess."""

    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    guesses: float = MAX_GUESSES
    counted: float = 0.0


class KeyGuesses:
    """How many different wrong keys an address may try.

    A client whose key is wrong sends the same one again and again; whoever guesses sends others. So
    wrong keys count once. An address may try 10, and gets one more every 6 seconds. Beyond that its
    keys are not looked at, except those that it has sent before and those of the form that
    ``midfill keys`` makes: 256 random bits can't be guessed. Clients that share an address with
    somebody who guesses, behind a router for instance, are thus let in as ever.

    Addresses that were silent longest are forgotten.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def check(self, host: str, key: bytes, digest: bytes) -> None:
        """Check that a key may be looked at.

        Args:
            host: the client's address.
            key: what it has sent.
            digest: of it.

        Raises:
            RateLimitError: too many wrong ones have come from there.
        """
        address = self._addresses.get(_network(host))
        if address is None or digest[:_DIGEST_BYTES] in address.seen or _MADE_KEY.fullmatch(key):
            return
        self._refill(address)
        if address.guesses < 1:
            wait = max(1, math.ceil((1 - address.guesses) * GUESS_SECONDS))
            raise RateLimitError(
                f"too many wrong API keys have come from this address; try again in {wait} s",
                retry_after=wait,
            )

    def record(self, host: str, key: bytes, digest: bytes, *, right: bool) -> None:
        """Record a key that was looked at; see ``check``."""
        name = _network(host)
        address = self._addresses.setdefault(name, _Address(counted=self._clock()))
        self._addresses.move_to_end(name)
        if len(self._addresses) > _MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        if (
            not right
            and digest[:_DIGEST_BYTES] not in address.seen
            and not _MADE_KEY.fullmatch(key)
        ):
            self._refill(address)
            address.guesses -= 1
        address.seen[digest[:_DIGEST_BYTES]] = None
        address.seen.move_to_end(digest[:_DIGEST_BYTES])
        if len(address.seen) > _MAX_KEYS:
            address.seen.popitem(last=False)

    def _refill(self, address: _Address) -> None:
        now = self._clock()
        gained = (now - address.counted) / GUESS_SECONDS
        address.guesses = min(MAX_GUESSES, address.guesses + gained)
        address.counted = now


def _network(host: str) -> str:
    """Return what stands for a client: its address, or its network where it has many addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]
    if address.version == 4 or address.ipv4_mapped is not None:
        return host
    return str(int(address) >> (address.max_prefixlen - _NETWORK_BITS))


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
        key = sent_key(request.headers.get("authorization", ""), basic=basic)
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


def sent_key(header: str, *, basic: bool = False) -> bytes | None:
    """Return the key of an Authorization header; None if it holds none.

    Args:
        header: its value.
        basic: take a password of HTTP's Basic authentication, too.
    """
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
