"""KeyRing: the API keys that are valid now."""

import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from midfill.errors import MidfillError
from midfill.server.key_file import ApiKey, key_digest, read_keys

_log = logging.getLogger(__name__)


class KeyRing:
    """Who may send requests. Without any key everybody may, as the tenant "".

    Keys that are given by themselves name their tenants "key-1", "key-2" and so on: a name tells
    nothing of its key. Those of a file have names there.
    """

    def __init__(self, keys: Sequence[str] = (), path: Path | None = None) -> None:
        """Read the keys.

        Args:
            keys: keys without a file.
            path: a file of keys; None is none.

        Raises:
            MidfillError: the file can't be used.
        """
        self._path = path
        self._own = tuple(
            ApiKey(f"key-{number}", key_digest(key.encode())) for number, key in enumerate(keys, 1)
        )
        self._keys = self._own + self._read()

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._keys)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of everybody who may send requests now."""
        return tuple(dict.fromkeys(key.name for key in self._keys)) or ("",)

    def find_tenant(self, key: bytes) -> str | None:
        """Return whose key it is; None if it is nobody's."""
        digest = key_digest(key)
        # Digests have one length, and all are compared, so the time taken reveals nothing.
        matches = [hmac.compare_digest(digest, known.digest) for known in self._keys]
        return self._keys[matches.index(True)].name if any(matches) else None

    def reload(self) -> None:
        """Read the file again; if it can't be used, the keys stay as they were, and a line says so.

        Requests in progress go on.
        """
        if self._path is None:
            return
        try:
            self._keys = self._own + self._read()
        except MidfillError as error:
            _log.error("the API keys stay as they were: %s", error)
        else:
            names = ", ".join(self.tenants)
            _log.warning("%d API keys are valid now, of %s", len(self._keys), names)

    def _read(self) -> tuple[ApiKey, ...]:
        return () if self._path is None else read_keys(self._path)
