"""Files of API keys: a name and a digest per line, so that whoever reads the file has no key.

    # who may use the model
    alice:sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90

A name may have several keys, which are one tenant: a new key can be handed out before the old one
is removed. Keys that ``midfill keys add`` makes are 256 random bits, so a plain digest of them
can't be searched through.
"""

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from midfill.errors import MidfillError
from midfill.system.atomic import replacing_file

_LINE = re.compile(r"(?P<name>[^:]*):sha256:(?P<digest>[0-9a-fA-F]{64})")
_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]{0,63}", re.ASCII)
_RESERVED = re.compile(r"key-\d+|other")  # names of keys that have none, and of metrics


@dataclass(frozen=True)
class ApiKey:
    """A key as the server knows it.

    Attributes:
        name: of its tenant, which logs and metrics show.
        digest: SHA-256 of the key in UTF-8.
    """

    name: str
    digest: bytes


def key_digest(key: bytes) -> bytes:
    """Return what is stored of a key."""
    return hashlib.sha256(key).digest()


def check_name(name: str) -> str:
    """Return a tenant's name.

    Raises:
        MidfillError: it can't be one.
    """
    if not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        raise MidfillError(
            f"{name!r} can't name a key: a name has up to 64 letters, digits and characters of"
            " . _ @ + -; key-1, key-2 and so on, and other, are midfill's own"
        )
    return name


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of keys.

    Raises:
        MidfillError: it can't be read, a line is wrong, or it has no key.
    """
    keys = []
    for number, line in enumerate(_read_lines(path), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise MidfillError(
                f"{path}: line {number} is not NAME:sha256:DIGEST; 'midfill keys add' writes such"
                " lines"
            )
        try:
            name = check_name(match["name"])
        except MidfillError as error:
            raise MidfillError(f"{path}: line {number}: {error}") from None
        keys.append(ApiKey(name, bytes.fromhex(match["digest"])))
    if not keys:
        raise MidfillError(f"{path}: has no key; 'midfill keys add {path} NAME' makes one")
    return tuple(keys)


def add_key(path: Path, name: str) -> str:
    """Make a key, add it to a file, which need not exist, and return it.

    Raises:
        MidfillError: the name can't be one, or the file can't be read or written.
    """
    check_name(name)
    lines = _read_lines(path) if path.exists() else []
    if lines:
        read_keys(path)
    key = f"mf-{secrets.token_urlsafe(32)}"
    _write_lines(path, [*lines, f"{name}:sha256:{key_digest(key.encode()).hex()}"])
    return key


def remove_keys(path: Path, name: str, *, keep_newest: bool) -> int:
    """Remove a name's keys from a file, and return how many; comments stay.

    Args:
        path: the file.
        name: whose keys.
        keep_newest: whether the last of them stays.

    Raises:
        MidfillError: the file can't be read or written, or is wrong.
    """
    read_keys(path)
    lines = _read_lines(path)
    found = [at for at, line in enumerate(lines) if line.strip().startswith(f"{name}:")]
    removed = found[:-1] if keep_newest else found
    if removed:
        _write_lines(path, [line for at, line in enumerate(lines) if at not in removed])
    return len(removed)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise MidfillError(f"{path}: is no text in UTF-8") from None
    except OSError as error:
        raise MidfillError(f"{path}: can't be read: {error.strerror or error}") from None


def _write_lines(path: Path, lines: list[str]) -> None:
    """Replace a file, which keeps its permissions; a new one is its owner's alone."""
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        with replacing_file(path) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.chmod(temporary, mode)
    except OSError as error:
        raise MidfillError(f"{path}: can't be written: {error.strerror or error}") from None
