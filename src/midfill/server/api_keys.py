"""Where API keys come from, and the names of their tenants."""

import re
from collections.abc import Sequence
from pathlib import Path

from midfill.config import ApiKey
from midfill.errors import MidfillError
from midfill.server.metrics import OTHERS

_NAME = re.compile(r"[\w.@+-]{1,64}")
_AUTOMATIC = re.compile(r"key-\d+")


def named_keys(keys: Sequence[str], files: Sequence[Path] = ()) -> tuple[ApiKey, ...]:
    """Return all keys with the names that logs and metrics show.

    A key without a name is "key-1", "key-2", ... by its place. That tells nothing of the key, of
    which a digest would let guesses be checked.

    Args:
        keys: keys without names.
        files: files with a key per line, alone or after its name.

    Raises:
        MidfillError: a file can't be read, or a line is none of these.
    """
    found = [("", key) for key in keys]
    for file in files:
        found += _read(file)
    return tuple(
        ApiKey(key, name or f"key-{number}") for number, (name, key) in enumerate(found, 1)
    )


def _read(path: Path) -> list[tuple[str, str]]:
    """Return (name, key) of each line that is neither empty nor a comment."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise MidfillError(f"--api-key-file {path} can't be read: {reason}") from None
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # The line is not quoted: it may hold a key.
        place = f"--api-key-file {path}, line {number}"
        if len(words) > 2:
            raise MidfillError(f"{place}: expected a key, or a name and a key")
        name, key = words if len(words) == 2 else ("", words[0])
        if name and not _NAME.fullmatch(name):
            raise MidfillError(
                f"{place}: a name is up to 64 letters, digits and characters of . _ @ + -"
            )
        if name == OTHERS or _AUTOMATIC.fullmatch(name):
            raise MidfillError(f"{place}: the name is one that midfill gives itself; take another")
        keys.append((name, key))
    if not keys:
        raise MidfillError(f"--api-key-file {path} holds no key; leave it out to serve without")
    return keys
