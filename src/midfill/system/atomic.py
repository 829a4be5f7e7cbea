"""Files and folders that appear whole or not at all, whatever happens while they are written."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from midfill.errors import MidfillError


def write_file(target: Path, content: str) -> None:
    """Write a text file; its folder is made if need be.

    Raises:
        MidfillError: it can't be written; what was there stays.
    """
    temporary = target.with_name(f".{target.name}.writing")
    with _told(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder that gets its name once it is complete.

    Raises:
        MidfillError: something can't be written; nothing is left behind, what was there stays.
    """
    temporary = target.with_name(f".{target.name}.writing")
    with _told(target):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            _open_to_others(temporary)
            _put(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _open_to_others(folder: Path) -> None:
    """Give files the mode that new ones get here; safetensors makes its own for the owner alone."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _put(temporary: Path, target: Path) -> None:
    if not target.exists():
        os.replace(temporary, target)
        return
    aside = target.with_name(f".{target.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(target, aside)
    os.replace(temporary, target)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Failures as one line. torch tells of a full disk by a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        first_line = str(reason).partition("\n")[0]
        raise MidfillError(
            f"{target}: can't be written: {first_line}; what was there before stays"
        ) from None
