"""The warm tier's folder on disk: one folder of chunks per model, all of them bounded together.

Several servers of one model have a folder each.
"""

import re
import shutil
from contextlib import suppress
from pathlib import Path

import filelock

from midfill.kv.tiers.chunk_folder import (
    ChunkFolder,
    FolderInUseError,
    make_private,
    remove_unfinished,
)
from midfill.system.cache import mark_used

_NAME = re.compile(r"[0-9a-f]{32}(-\d+)?")
_MAX_SERVERS = 64  # of one model on one machine
_OTHERS_SHARE = 0.5  # of the space, at most, for models that aren't served now


def open_disk_folder(folder: Path, name: str, size: int) -> ChunkFolder:
    """Open a model's folder of chunks, creating it if needed.

    What other models left counts, too: the least recently used are removed until at most half of
    the space is theirs. Those that another server is using have space of their own.

    Args:
        folder: the folder of all models.
        name: of the model, see ``KvIdentity.name``.
        size: bytes for all.

    Raises:
        MidfillError: it can't be used.
    """
    if not folder.exists():
        make_private(folder)
    opened = _open_first_free(folder, name, size)
    opened.shrink(size - _shrink_others(folder, opened.path, int(_OTHERS_SHARE * size)))
    mark_used(opened.path)
    return opened


def _open_first_free(folder: Path, name: str, size: int) -> ChunkFolder:
    for number in range(1, _MAX_SERVERS):
        with suppress(FolderInUseError):
            path = folder / (name if number == 1 else f"{name}-{number}")
            return ChunkFolder(path, size, durable=True)
    return ChunkFolder(folder / name, size, durable=True)


def _shrink_others(folder: Path, own: Path, size: int) -> int:
    """Remove folders of other models until they have at most ``size`` bytes; return how many."""
    others: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            if path != own and _NAME.fullmatch(path.name) and not path.is_symlink():
                with suppress(OSError, filelock.Timeout), _locked(path):
                    remove_unfinished(path)
                    used = sum(one.lstat().st_size for one in path.iterdir())
                    others.append((path.stat().st_mtime, used, path))
    total = sum(used for _, used, _ in others)
    for _, used, path in sorted(others):
        if total <= size:
            break
        with suppress(OSError, filelock.Timeout), _locked(path):
            shutil.rmtree(path, ignore_errors=True)
            total -= used
    return total


def _locked(path: Path) -> filelock.BaseFileLock:
    """Return a lock that is free while no server uses a folder."""
    return filelock.FileLock(path / "lock", blocking=False)
