"""BatchStore: the files and batches of OpenAI's API, in a folder per tenant.

Everything is on disk, so unfinished batches go on after a restart. What a tenant stores is bounded
in bytes and in number, and a tenant is only ever given what is in its own folder. Folders are named
by a digest of what names a tenant, or of its key if it has no name, so that another key never gets
what this one has stored.
"""

import asyncio
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from filelock import FileLock, Timeout

from midfill.errors import MidfillError
from midfill.serving.server.batch.rows import RowResult
from midfill.serving.server.responses import ApiError
from midfill.system.files import rename_synced, replacing_file

_PRIVATE_FOLDER = 0o700
_LOCK = ".lock"
_DIGEST_BYTES = 16

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
UNFINISHED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class FileObject(msgspec.Struct, kw_only=True):
    """A stored file, as OpenAI describes one.

    Attributes:
        id: names it.
        bytes: its size.
        created_at: seconds since 1970.
        filename: the client's name for it.
        purpose: "batch" of an input, "batch_output" of results and errors.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class RequestCounts(msgspec.Struct, kw_only=True):
    """How many rows a batch has, and how many of them have an answer or an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(msgspec.Struct, kw_only=True):
    """Why a batch has failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(msgspec.Struct, kw_only=True):
    """OpenAI's list of them."""

    data: list[BatchFault]
    object: str = "list"


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch, as OpenAI describes one; times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    status: BatchStatus = "validating"
    object: str = "batch"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether something is still to be done for it."""
        return self.status in UNFINISHED

    def enter(self, status: BatchStatus) -> None:
        """Change its status, and note when."""
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", int(time.time()))


T = TypeVar("T", FileObject, BatchObject)


class TenantBatches:
    """What one tenant has stored.

    Attributes:
        folder: where.
        files, batches: by id, oldest first.
    """

    def __init__(self, folder: Path, max_bytes: int, max_files: int) -> None:
        """Read what is there.

        Raises:
            MidfillError: the folder can't be used.
        """
        self.folder = folder
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._reserved = 0
        self._writing = asyncio.Lock()
        try:
            for name in ("files", "batches"):
                (folder / name).mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
            for left in (folder / "files").glob("*.upload"):
                left.unlink(missing_ok=True)
            self.files = _read_all(folder / "files", FileObject)
            self.batches = _read_all(folder / "batches", BatchObject)
        except OSError as error:
            raise MidfillError(f"{folder}: {error.strerror}") from None

    def content(self, file_id: str) -> Path:
        """Return where a file's content is."""
        return self.folder / "files" / f"{file_id}.jsonl"

    def results(self, batch_id: str) -> Path:
        """Return where a batch's results are collected."""
        return self.folder / "batches" / f"{batch_id}.results"

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be stored."""
        held = sum(file.bytes for file in self.files.values())
        held += sum(
            _size(self.results(batch.id)) for batch in self.batches.values() if batch.is_unfinished
        )
        return self._max_bytes - held - self._reserved

    def begin_file(self) -> Path:
        """Return where a new file's content is to be written.

        Raises:
            ApiError: there are as many files as may be.
        """
        if len(self.files) >= self._max_files:
            raise ApiError(
                400,
                f"{self._max_files} files are stored, as many as may be; delete some first",
                code="too_many_files",
            )
        return self.folder / "files" / f"file-{uuid.uuid4().hex}.upload"

    def begin_result(self) -> Path:
        """Return where a file of results is to be written; they count as bytes alone."""
        return self.folder / "files" / f"file-{uuid.uuid4().hex}.upload"

    def reserve(self, size: int) -> None:
        """Count bytes of a file that is being received; negative ones are given back.

        Raises:
            ApiError: there is no room for them.
        """
        if size > 0 and size > self.free_bytes:
            raise no_room()
        self._reserved += size

    async def add_file(self, path: Path, filename: str, purpose: str) -> FileObject:
        """Store a file whose content is at a path of ``begin_file``.

        Raises:
            OSError: it can't be written.
        """
        file = FileObject(
            id=path.stem, bytes=path.stat().st_size, created_at=int(time.time()),
            filename=filename, purpose=purpose,
        )  # fmt: skip
        await asyncio.to_thread(rename_synced, path, self.content(file.id))
        await self._write("files", file)
        self.files[file.id] = file
        return file

    def delete_file(self, file_id: str) -> None:
        """Remove a file."""
        del self.files[file_id]
        (self.folder / "files" / f"{file_id}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    async def save(self, batch: BatchObject) -> None:
        """Store a batch's state; the oldest finished ones beyond the number of files are forgotten.

        Raises:
            OSError: it can't be written.
        """
        self.batches[batch.id] = batch
        finished = [each.id for each in self.batches.values() if not each.is_unfinished]
        for batch_id in finished[: max(len(finished) - self._max_files, 0)]:
            del self.batches[batch_id]
            (self.folder / "batches" / f"{batch_id}.json").unlink(missing_ok=True)
        await self._write("batches", batch)

    async def _write(self, kind: str, what: FileObject | BatchObject) -> None:
        """Write an object to the disk, in its state when it is its turn."""
        async with self._writing:
            path, content = self.folder / kind / f"{what.id}.json", msgspec.json.encode(what)
            await asyncio.to_thread(_replace, path, content)


def _replace(path: Path, content: bytes) -> None:
    with replacing_file(path) as temporary:
        temporary.write_bytes(content)


class BatchStore:
    """What all tenants have stored.

    Args:
        folder: where; made if needed.
        max_bytes: of each tenant's files.
        max_files: of each tenant.
        identity_of: returns what names a tenant at later starts, too, see ``KeyRing.identity``.
        max_rows: of each tenant's unfinished batches.

    Raises:
        MidfillError: it can't be used, or another server uses it.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        max_files: int,
        identity_of: Callable[[str], bytes] = str.encode,
        max_rows: int = 50_000,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_rows = max_rows
        self._folder = folder
        self._max_files = max_files
        self._identity_of = identity_of
        self._tenants: dict[str, TenantBatches] = {}
        try:
            folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._lock = FileLock(folder / _LOCK, timeout=0)
            self._lock.acquire()
        except Timeout:
            raise MidfillError(
                f"{folder}: another server keeps its batches there; name another with"
                " --batch-folder"
            ) from None
        except OSError as error:
            raise MidfillError(f"{folder}: {error.strerror}") from None

    def of(self, tenant: str) -> TenantBatches:
        """Return what a tenant has stored."""
        found = self._tenants.get(tenant)
        if found is None:
            identity = self._identity_of(tenant)
            digest = hashlib.blake2b(identity, digest_size=_DIGEST_BYTES).hexdigest()
            found = TenantBatches(self._folder / digest, self.max_bytes, self._max_files)
            self._tenants[tenant] = found
        return found

    def unfinished(self) -> Iterator[tuple[str, TenantBatches, BatchObject]]:
        """Yield the unfinished batches of all tenants that have been asked for."""
        for tenant, stored in self._tenants.items():
            for batch in stored.batches.values():
                if batch.is_unfinished:
                    yield tenant, stored, batch

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.release()


def no_room() -> ApiError:
    """Return the error of a tenant that has stored as much as it may."""
    return ApiError(
        413,
        "there is no room for this among your stored files; delete some first",
        code="storage_full",
    )


def split_results(results: Path, output: Path, errors: Path) -> tuple[bool, bool]:
    """Copy the rows of a batch's results that have an answer, and those that have none.

    Args:
        results: all rows.
        output, errors: where they go.

    Returns:
        Whether there are rows of each kind; a file without rows is not made.
    """

    found = [False, False]
    with results.open("rb") as rows, output.open("wb") as good, errors.open("wb") as bad:
        for line in rows:
            failed = not msgspec.json.decode(line, type=RowResult).succeeded
            found[failed] = True
            (bad if failed else good).write(line)
        for file in (good, bad):
            file.flush()
            os.fsync(file.fileno())
    for path, there in zip((output, errors), found, strict=True):
        if not there:
            path.unlink()
    return found[0], found[1]


def _read_all(folder: Path, kind: type[T]) -> dict[str, T]:
    """Return the objects of a folder by id, the oldest first; what can't be read is left out."""
    found: list[T] = []
    for path in folder.glob("*.json"):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
    found.sort(key=lambda each: each.created_at)
    return {each.id: each for each in found}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
