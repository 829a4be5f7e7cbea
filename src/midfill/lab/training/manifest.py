"""Manifest: which documents a run was trained on, under which licence, from which package."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError

MANIFEST = "manifest.jsonl"
"""Name of the file in a run's folder."""


@dataclass(frozen=True, slots=True, order=True)
class ManifestEntry:
    """One document.

    Attributes:
        name: its path in its source.
        sha256: of its content.
        licence: SPDX identifier; None where it is unknown.
        package: name and version of the package it is from, such as "attrs==25.4.0"; None if it is
            from none that was fetched by name and version.
    """

    name: str
    sha256: str
    licence: str | None = None
    package: str | None = None


def manifest_text(entries: Iterable[ManifestEntry]) -> str:
    """Return the manifest's content: one JSON object per line, sorted by name."""
    return "".join(json.dumps(asdict(entry)) + "\n" for entry in sorted(entries, key=_order))


def read_manifest(path: Path) -> list[ManifestEntry]:
    """Read a manifest.

    Raises:
        MidfillError: the file is missing or broken.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [ManifestEntry(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise MidfillError(f"{path}: not a manifest: {error}") from None


def describe_manifest(entries: Iterable[ManifestEntry]) -> dict[str, Any]:
    """Return what a model card says of the documents.

    Licences are counted, the most frequent first. Sources are packages, or folders directly below
    the sources.
    """
    entries = list(entries)
    licences = Counter(entry.licence or "unknown" for entry in entries)
    sources = {entry.package or _folder(entry.name) for entry in entries} - {""}
    return {
        "documents": len(entries),
        "licences": dict(licences.most_common()),
        "sources": ", ".join(sorted(sources, key=str.lower)),
        "manifest_sha256": hashlib.sha256(manifest_text(entries).encode()).hexdigest(),
    }


def _folder(name: str) -> str:
    return name.split("/")[1] if name.count("/") > 1 else ""


def _order(entry: ManifestEntry) -> tuple[Any, ...]:
    return entry.name, entry.sha256
