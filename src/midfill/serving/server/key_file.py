"""Files of API keys: a name and a digest per line, so that whoever reads the file has no key.

    # who may use the model
    alice:sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90
    alice:limits:requests=60 tokens=100000 running=4
    prometheus:sha256:b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c
    prometheus:monitor

A name may have several keys, which are one tenant: a new key can be handed out before the old one
is removed. Keys that ``midfill keys add`` makes are 256 random bits, so a plain digest of them
can't be searched through. Limits (``limits.TenantLimits``) are a name's, whichever of its keys is
used; ``*:limits:`` is for names without a line of their own. A monitor's keys read metrics and the
dashboard, and nothing else.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from midfill.errors import MidfillError
from midfill.serving.server.limits import NO_LIMITS, TenantLimits
from midfill.system.files import replacing_file

EVERYONE = "*"
"""The name of limits for all names without their own."""

_LINE = re.compile(
    r"(?P<name>[^:]*):(?:sha256:(?P<digest>[0-9a-fA-F]{64})|limits:(?P<limits>.*)|(?P<role>monitor))"
)
_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]{0,63}", re.ASCII)
_RESERVED = re.compile(r"key-\d+|other")  # names of keys that have none, and of metrics
_LIMIT = re.compile(r"(?P<name>[a-z]+)=(?P<number>[0-9]{1,12})")
_LIMIT_NAMES = tuple(each.name for each in fields(TenantLimits))


@dataclass(frozen=True)
class ApiKey:
    """A key as the server knows it.

    Attributes:
        name: of its tenant, which logs and metrics show.
        digest: SHA-256 of the key in UTF-8.
    """

    name: str
    digest: bytes


@dataclass(frozen=True)
class KeyFile:
    """What a file of keys says.

    Attributes:
        keys: in the file's order.
        limits: by name.
        monitors: names whose keys only read metrics.
    """

    keys: tuple[ApiKey, ...] = ()
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    monitors: frozenset[str] = frozenset()


def key_digest(key: bytes) -> bytes:
    """Return what is stored of a key."""
    return hashlib.sha256(key).digest()


def digest_line(text: str) -> ApiKey | None:
    """Return the key of a line ``NAME:sha256:DIGEST``; None if a text is no such line.

    Raises:
        MidfillError: it is one, but the name can't be one.
    """
    match = _LINE.fullmatch(text)
    if match is None or match["digest"] is None:
        return None
    return ApiKey(check_name(match["name"]), bytes.fromhex(match["digest"]))


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


def read_key_file(path: Path) -> KeyFile:
    """Read a file of keys.

    Raises:
        MidfillError: it can't be read, a line is wrong, or it has no key.
    """
    keys: list[ApiKey] = []
    limits: dict[str, TenantLimits] = {}
    monitors: set[str] = set()
    for number, line in enumerate(_read_lines(path), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise MidfillError(
                f"{path}: line {number} is not NAME:sha256:DIGEST, NAME:limits:... or"
                " NAME:monitor; 'midfill keys' writes such lines"
            )
        name = match["name"]
        try:
            if match["limits"] is None or name != EVERYONE:
                check_name(name)
            if match["digest"] is not None:
                keys.append(ApiKey(name, bytes.fromhex(match["digest"])))
            elif match["role"] is not None:
                monitors.add(name)
            elif name in limits:
                raise MidfillError(f"the limits of {name} are there twice")
            else:
                limits[name] = _parse_limits(match["limits"])
        except MidfillError as error:
            raise MidfillError(f"{path}: line {number}: {error}") from None
    if not keys:
        raise MidfillError(f"{path}: has no key; 'midfill keys add {path} NAME' makes one")
    return KeyFile(tuple(keys), limits, frozenset(monitors))


def add_key(path: Path, name: str, *, monitor: bool = False) -> str:
    """Make a key, add it to a file, which need not exist, and return it.

    Args:
        path: the file.
        name: whose key.
        monitor: whether the name's keys only read metrics.

    Raises:
        MidfillError: the name can't be one, or is a monitor's or a client's already, or the file
            can't be read or written.
    """
    check_name(name)
    lines = _read_lines(path) if path.exists() else []
    known = read_key_file(path) if lines else KeyFile()
    if name in {key.name for key in known.keys} and monitor != (name in known.monitors):
        kind = "clients" if monitor else "a monitor"
        raise MidfillError(f"{path}: {name} is the name of {kind}; choose another")
    key = f"mf-{secrets.token_urlsafe(32)}"
    lines.append(f"{name}:sha256:{key_digest(key.encode()).hex()}")
    if monitor and name not in known.monitors:
        lines.append(f"{name}:monitor")
    _write_lines(path, lines)
    return key


def set_limits(path: Path, name: str, limits: TenantLimits) -> None:
    """Replace a name's limits in a file; limits that are all None are removed.

    Raises:
        MidfillError: the name has no key, or the file can't be read or written, or is wrong.
    """
    names = {key.name for key in read_key_file(path).keys}
    if name not in {*names, EVERYONE}:
        raise MidfillError(f"{path} has no key of {name}")
    lines = [line for line in _read_lines(path) if not line.strip().startswith(f"{name}:limits:")]
    if limits != NO_LIMITS:
        lines.append(f"{name}:limits:{format_limits(limits)}")
    _write_lines(path, lines)


def remove_keys(path: Path, name: str, *, keep_newest: bool) -> int:
    """Remove a name's keys from a file, and return how many; comments stay.

    With the last key, the name's limits and role are removed, too.

    Args:
        path: the file.
        name: whose keys.
        keep_newest: whether the last of them stays.

    Raises:
        MidfillError: the file can't be read or written, or is wrong.
    """
    read_key_file(path)
    lines = _read_lines(path)
    keys = [at for at, line in enumerate(lines) if line.strip().startswith(f"{name}:sha256:")]
    removed = set(keys[:-1] if keep_newest else keys)
    count = len(removed)
    if count and not keep_newest:
        removed |= {at for at, line in enumerate(lines) if line.strip().startswith(f"{name}:")}
    if count:
        _write_lines(path, [line for at, line in enumerate(lines) if at not in removed])
    return count


def format_limits(limits: TenantLimits) -> str:
    """Return limits as a file holds them."""
    values = ((name, getattr(limits, name)) for name in _LIMIT_NAMES)
    return " ".join(f"{name}={value}" for name, value in values if value is not None)


def _parse_limits(text: str) -> TenantLimits:
    found: dict[str, int] = {}
    for word in text.split():
        match = _LIMIT.fullmatch(word)
        if match is None or match["name"] not in _LIMIT_NAMES or match["name"] in found:
            names = ", ".join(f"{name}=NUMBER" for name in _LIMIT_NAMES)
            raise MidfillError(f"{word!r} is no limit; there are {names}, each once")
        found[match["name"]] = int(match["number"])
        if not found[match["name"]]:
            raise MidfillError(f"{word!r} allows nothing; remove the name's keys instead")
    if not found:
        raise MidfillError("there is no limit behind 'limits:'")
    return TenantLimits(**found)


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
        with replacing_file(path, mode=0o600) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.chmod(temporary, mode)
    except OSError as error:
        raise MidfillError(f"{path}: can't be written: {error.strerror or error}") from None
