"""WarmTier: chunks of KV in host memory and on disk, written and read beside the engine's steps.

Both are folders of files (``folders``), in memory one of a file system without a disk: so both
outlive an engine process that is killed. Every chunk goes to both. Files are written by one thread
and read by another; the engine only hands chunks over and takes them back. What a file holds is
believed only if its checksum is right and it is what was asked for.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.blob import RAW, BlobError, KvBlob, KvIdentity, decode_blob
from midfill.kv.tiers.folders import ChunkFolder
from midfill.kv.tiers.load_policy import MeasuredRate

_log = logging.getLogger(__name__)
MAX_QUEUED_BYTES = 64 * 2**20
"""KV that waits to be written; beyond it the engine hands over no more."""

MAX_ARRIVED = 16
"""Chunks that are read ahead of being taken."""


class ChunkCodec(Protocol):
    """Codes the KV of chunks; any thread may call it.

    Attributes:
        name: written into each blob; KV of another codec isn't read. It says what the codec does
            and all that its codes depend on.
    """

    @property
    def name(self) -> str:
        """See the class."""

    def encode(self, data: bytes, tokens: int) -> bytes:
        """Return the code of the KV of some tokens, laid out as ``kv.blob.RAW``.

        Raises:
            ValueError: it can't be coded.
        """

    def decode(self, code: bytes | memoryview, tokens: int) -> bytes:
        """Return KV like that from which ``code`` was made.

        Raises:
            BlobError: the code makes no sense.
        """


class WantedChunk(NamedTuple):
    """A chunk that is to be loaded.

    Attributes:
        key: its name.
        tenant: whose it has to be, ``bind_tenant``.
        parent: key of what comes before it.
        start: position of its first token.
        tokens: [n] int32.
    """

    key: bytes
    tenant: bytes
    parent: bytes
    start: int
    tokens: Int32Array


@dataclass(eq=False)
class TierLoad:
    """Chunks on their way from the tier, in order.

    Attributes:
        chunks: what is loaded.
        arrived: what has come and was not taken yet.
        finished: whether nothing more will come. Set after the last chunk has arrived.
        cancelled: whether no more is needed.
    """

    chunks: Sequence[WantedChunk]
    arrived: deque[KvBlob] = field(default_factory=deque)
    finished: bool = False
    cancelled: bool = False
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_ARRIVED))

    def take(self) -> KvBlob:
        """Return the next chunk that has arrived."""
        self.room.release()
        return self.arrived.popleft()

    def cancel(self) -> None:
        """Say that no more is needed."""
        self.cancelled = True
        self.arrived.clear()
        self.room.release(MAX_ARRIVED)


@dataclass(eq=False)
class TierCounts:
    """What the tier did since the start.

    Attributes:
        stored_chunks, stored_bytes: written, to any folder.
        loaded_chunks: read, by folder: memory, disk.
        rejected_chunks: removed since they were damaged or not what was asked for.
        failed_writes: not written for lack of space or another error.
        dropped_chunks: not stored since their KV was evicted first.
    """

    stored_chunks: int = 0
    stored_bytes: int = 0
    loaded_chunks: dict[str, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})
    rejected_chunks: int = 0
    failed_writes: int = 0
    dropped_chunks: int = 0


class WarmTier:
    """Stores and loads chunks. Belongs to one engine, whose thread calls it.

    Attributes:
        identity: of the KV in it.
        counts: what it did.
        rates: bytes per second that are loaded, by folder.
    """

    def __init__(
        self,
        identity: KvIdentity,
        *,
        memory: ChunkFolder | None,
        disk: ChunkFolder | None,
        codec: ChunkCodec | None = None,
    ) -> None:
        """Start the threads.

        Args:
            identity: of the KV that may be loaded; its variant names the codec.
            memory, disk: where chunks are kept; None: not there.
            codec: how their KV is written; None writes it as it was computed.
        """
        self.counts = TierCounts()
        folders = {"memory": memory, "disk": disk}
        self.folders = {name: folder for name, folder in folders.items() if folder is not None}
        self.rates = {name: MeasuredRate() for name in self.folders}
        self.changed = threading.Event()
        self.identity = identity
        self._codec = codec
        # Chunks and those before them, in order of arrival.
        self._queued: dict[bytes, tuple[KvBlob, tuple[bytes, ...]]] = {}
        self._queued_bytes = 0
        self._loads: deque[TierLoad] = deque()
        self._wake_writer, self._wake_reader = threading.Condition(), threading.Condition()
        self._failed = self._closed = False
        self._reading: TierLoad | None = None
        for target in (self._write_chunks, self._read_chunks):
            threading.Thread(target=target, name=f"kv-tier{target.__name__}", daemon=True).start()

    def __contains__(self, key: bytes) -> bool:
        """Whether a chunk is stored, or about to be."""
        return key in self._queued or any(key in folder for folder in self.folders.values())

    @property
    def is_full(self) -> bool:
        """Whether no more can be handed over now."""
        return self._queued_bytes >= MAX_QUEUED_BYTES

    @property
    def is_stalled(self) -> bool:
        """Whether a file is being read that nobody waits for any more: new loads would wait."""
        reading = self._reading
        return reading is not None and reading.cancelled

    def place(self, key: bytes) -> str | None:
        """Return the fastest folder that holds a chunk; None if none does."""
        return next((name for name, folder in self.folders.items() if key in folder), None)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the chunks of a text as just used."""
        for folder in self.folders.values():
            folder.touch(keys)

    def store(self, blob: KvBlob, before: Sequence[bytes] = ()) -> None:
        """Hand a chunk over to be written.

        Args:
            blob: the chunk.
            before: the chunks before it in its text.
        """
        key = blob.key
        with self._wake_writer:
            self._queued_bytes += len(blob.data)
            self._queued[key] = blob, tuple(before)
            self._wake_writer.notify()

    def load(self, chunks: Sequence[WantedChunk]) -> TierLoad:
        """Read chunks, in order; one that can't be had ends the load."""
        load = TierLoad(chunks)
        with self._wake_reader:
            self._loads.append(load)
            self._wake_reader.notify()
        return load

    def flush(self, seconds: float) -> None:
        """Wait until all that was handed over is written, at most for so long."""
        end = time.monotonic() + seconds
        with self._wake_writer:
            while self._queued and (left := end - time.monotonic()) > 0:
                self._wake_writer.wait(left)

    def close(self) -> None:
        """End the threads; what isn't written yet is lost, and nothing unfinished is left."""
        self._closed = True
        for condition in (self._wake_writer, self._wake_reader):
            with condition:
                condition.notify_all()
        for folder in self.folders.values():
            folder.close()

    # --- the threads ---

    def _write_chunks(self) -> None:
        while True:
            with self._wake_writer:
                while not self._queued and not self._closed:
                    self._wake_writer.wait()
                if self._closed:
                    return
                key, (blob, before) = next(iter(self._queued.items()))
            try:
                self._write(key, blob, before)
            except Exception:
                _log.exception("a chunk of KV could not be stored")
            with self._wake_writer:
                del self._queued[key]
                self._queued_bytes -= len(blob.data)
                self._wake_writer.notify_all()
            self.changed.set()

    def _write(self, key: bytes, blob: KvBlob, before: Sequence[bytes]) -> None:
        if self._codec is not None:
            code = self._codec.encode(bytes(blob.data), len(blob.tokens))
            blob = dataclasses.replace(blob, codec=self._codec.name, data=code)
        content = blob.encode()
        for name, folder in self.folders.items():
            if key in folder:
                continue
            try:
                stored = folder.store(key, content, before)
            except OSError as error:
                self.counts.failed_writes += 1
                if not self._failed:
                    self._failed = True
                    _log.warning(
                        "the warm tier can't write to its %s folder %s (%s): what doesn't fit is"
                        " computed again", name, folder.path, error.strerror or error,
                    )  # fmt: skip
            else:
                self.counts.stored_chunks += stored
                self.counts.stored_bytes += len(content) if stored else 0

    def _read_chunks(self) -> None:
        while True:
            with self._wake_reader:
                while not self._loads and not self._closed:
                    self._wake_reader.wait()
                if self._closed:
                    return
                load = self._reading = self._loads.popleft()
            try:
                for wanted in load.chunks:
                    load.room.acquire()
                    blob = None if load.cancelled else self._read(wanted)
                    if blob is None:
                        break
                    load.arrived.append(blob)
                    self.changed.set()
            except Exception:
                _log.exception("chunks of KV could not be loaded")
            finally:
                self._reading = None
                load.finished = True
                self.changed.set()

    def _read(self, wanted: WantedChunk) -> KvBlob | None:
        """Return a chunk from the first folder that has it whole."""
        for name, folder in self.folders.items():
            started = time.perf_counter()
            content = folder.load(wanted.key)
            if content is None:
                continue
            try:
                blob = self._checked(content, wanted)
            except BlobError as error:
                self.counts.rejected_chunks += 1
                folder.remove(wanted.key)
                _log.warning("removed a chunk of KV from %s: %s", folder.path, error)
                continue
            self.rates[name].record(len(content), time.perf_counter() - started)
            self.counts.loaded_chunks[name] += 1
            return blob
        return None

    def _checked(self, content: bytes, wanted: WantedChunk) -> KvBlob:
        """Return the blob that a file holds.

        Raises:
            BlobError: it is damaged, or not the one that is wanted.
        """
        blob = decode_blob(content)
        blob.require(self.identity, wanted.tenant)
        same = (blob.parent, blob.start) == (wanted.parent, wanted.start)
        if not same or not np.array_equal(blob.tokens, wanted.tokens):
            raise BlobError("the KV is of other tokens than its name says")
        if self._codec is None:
            return blob
        if blob.codec != self._codec.name:
            raise BlobError(f"the KV is coded as {blob.codec!r}, not {self._codec.name!r}")
        data = self._codec.decode(blob.data, len(blob.tokens))
        return dataclasses.replace(blob, codec=RAW, data=data)
