"""Real source files to measure with, found where they are installed."""

import hashlib
import importlib.metadata
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import SHIPPED_ADAPTERS

_MANIFEST = "*/manifest.jsonl"

_LIBRARIES = ("numba", "numpy", "torch")
"""Libraries that midfill always needs and that no shipped adapter was trained on."""


def standard_library_documents(
    count: int, *, seed: int = 0, shortest: int = 6000, longest: int = 9000
) -> list[str]:
    """Return ``count`` files of Python's standard library, a seeded choice.

    Args:
        shortest, longest: characters of a file.

    Raises:
        ValueError: there are not that many such files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)
    texts = [text for _, text in _read(paths, shortest, longest)]
    if len(texts) < count:
        raise ValueError(f"only {len(texts)} of {count} wanted files are in {root}")
    return random.Random(seed).sample(texts, count)


class UnseenDocuments(NamedTuple):
    """Files that no shipped adapter was trained on.

    Attributes:
        texts: of the files.
        source: where they come from, such as "numpy 2.4.0 and torch 2.13.0".
    """

    texts: list[str]
    source: str


def unseen_documents(
    count: int, *, seed: int = 0, shortest: int = 6000, longest: int = 9000
) -> UnseenDocuments:
    """Return ``count`` files of installed libraries whose hash is in no adapter's manifest.

    A manifest lists the documents that an adapter was trained on by the SHA-256 of their content.

    Args:
        shortest, longest: characters of a file.

    Raises:
        MidfillError: the libraries hold fewer such files.
    """
    seen = trained_hashes()
    versions, paths = [], []
    for name in _LIBRARIES:
        distribution = importlib.metadata.distribution(name)
        versions.append(f"{name} {distribution.version}")
        files = (file for file in distribution.files or () if file.suffix == ".py")
        paths += [Path(str(file.locate())) for file in files]
    texts = [
        text
        for content, text in _read(sorted(paths), shortest, longest)
        if hashlib.sha256(content).hexdigest() not in seen
    ]
    if len(texts) < count:
        raise MidfillError(
            f"only {len(texts)} of {count} wanted files are in {', '.join(versions)}"
        )
    *before, last = versions
    chosen = random.Random(seed).sample(texts, count)
    return UnseenDocuments(chosen, f"{', '.join(before)} and {last}")


def trained_hashes() -> set[str]:
    """Return the SHA-256 of every document that a shipped adapter was trained on."""
    lines = (
        line
        for manifest in SHIPPED_ADAPTERS.glob(_MANIFEST)
        for line in manifest.read_text("utf-8").splitlines()
    )
    return {json.loads(line)["sha256"] for line in lines}


def _read(paths: Iterable[Path], shortest: int, longest: int) -> Iterator[tuple[bytes, str]]:
    """Yield content and text of the files that hold so many characters of UTF-8."""
    for path in paths:
        if not path.is_file() or not shortest <= path.stat().st_size <= 2 * longest:
            continue
        content = path.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if shortest <= len(text) <= longest:
            # As files opened in text mode are read.
            yield content, text.replace("\r\n", "\n").replace("\r", "\n")
