"""KeyRing: the API keys that are valid now, and what each may do."""

import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from midfill.errors import MidfillError
from midfill.serving.server.key_file import (
    EVERYONE,
    ApiKey,
    KeyFile,
    digest_line,
    key_digest,
    read_key_file,
)
from midfill.serving.server.key_guesses import KeyGuesses
from midfill.serving.server.limits import NO_LIMITS, TenantLimits

_log = logging.getLogger(__name__)


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
