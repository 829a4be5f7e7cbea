"""KvCopies: KV of cached tokens as bytes, and back into the prefix cache."""

from collections.abc import Sequence

import numpy as np

from midfill.arrays import Int32Array
from midfill.kv.blob import RAW, BlobError, KvBlob
from midfill.kv.pool import KVPool
from midfill.kv.radix_node import CacheRoot
from midfill.kv.ragged import cells_of_slots
from midfill.runners.forward.cells import UInt8Array
from midfill.runners.forward.runner import Runner

_COPY_BYTES = 4 * 2**20


class NoRoomError(RuntimeError):
    """KV can't be put into the cache: slots are too few, or what comes before it was evicted."""


def layout_name(runner: Runner) -> str:
    """Return how a runner stores KV, for ``KvIdentity.layout``."""
    config = runner.config
    shape = f"{config.layers}x{config.kv_heads}x{config.head_dim}"
    return f"{runner.cells.layout.format} {shape}"


class KvCopies:
    """Copies KV between slots and bytes, between two steps.

    Args:
        runner: holds the KV.
        pool: its slots.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._runner = runner
        self._pool = pool
        self._heads = runner.config.layers * runner.config.kv_heads
        self._widths = runner.cells.layout.widths

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV."""
        return self._heads * sum(self._widths)

    def dump(self, slots: Int32Array) -> bytes:
        """Return the KV of [n] int32 slots, laid out as in ``KvBlob.data``."""
        cells = cells_of_slots(slots, self._heads, self._runner.slots).reshape(-1)
        return b"".join(array.data for array in self._runner.cells.dump(cells))

    def join(self, parts: Sequence[tuple[int, bytes]]) -> bytes:
        """Return what ``dump`` would return for all slots of (slots, dumped) parts together."""
        if len(parts) == 1:
            return parts[0][1]
        # Small pieces of bytes: Python joins nothing else without stopping the engine's thread.
        arrays: list[bytes] = []
        at = 0
        for width in self._widths:
            pieces = [
                np.frombuffer(data, np.uint8)[at * count : (at + self._heads * width) * count]
                for count, data in parts
            ]
            shaped = [piece.reshape(self._heads, -1) for piece in pieces]
            flat = np.concatenate(shaped, axis=1).reshape(-1)
            arrays += [
                flat[i : i + _COPY_BYTES].tobytes() for i in range(0, len(flat), _COPY_BYTES)
            ]
            at += self._heads * width
        return b"".join(arrays)

    def check(self, blob: KvBlob) -> None:
        """Check that a blob's data is what this runner stores.

        Raises:
            BlobError: it has another codec or size.
        """
        if blob.codec != RAW:
            raise BlobError(f"the KV is coded as {blob.codec!r}, which can't be read here")
        expected = len(blob.tokens) * self.token_bytes
        if len(blob.data) != expected:
            raise BlobError(f"{len(blob.data)} bytes of KV, {expected} expected")

    def cached(self, root: CacheRoot, tokens: Int32Array) -> int:
        """Return how many of [n] int32 ``tokens`` are cached, from the first on."""
        return self._pool.cache.peek(root, tokens).tokens

    def insert(
        self, root: CacheRoot, tokens: Int32Array, start: int, blob: KvBlob, first: int
    ) -> None:
        """Put a part of a blob's KV into the prefix cache.

        Args:
            root: the tree.
            tokens: [n] int32, from position 0 to the end of the part.
            start: position of the part's first token; all before it have to be cached.
            blob: a checked blob that covers the part.
            first: number of the part's first token in the blob.

        Raises:
            NoRoomError: it can't be put there.
        """
        cache, count = self._pool.cache, len(tokens) - start
        found = cache.match(root, tokens[:start])
        if len(found) < start:
            raise NoRoomError("what comes before it was evicted")
        cache.lock(found.node)
        try:
            if self._pool.available < count:
                raise NoRoomError("too few slots are free")
            slots = self._pool.allocate(count)
            self._restore(slots, blob, first)
            stored = cache.insert(root, tokens, np.concatenate((found.slots, slots)), found.node)
            self._pool.slots.free(stored.duplicates)
        finally:
            cache.unlock(found.node)

    def _restore(self, slots: Int32Array, blob: KvBlob, first: int) -> None:
        """Write the KV of a blob's tokens from ``first`` on to slots."""
        part = slice(first, first + len(slots))
        arrays: list[UInt8Array] = []
        data, at, tokens = np.frombuffer(blob.data, np.uint8), 0, len(blob.tokens)
        for width in self._widths:
            size = self._heads * tokens * width
            stored = data[at : at + size].reshape(self._heads, tokens, width)
            arrays.append(stored[:, part].reshape(-1, width))
            at += size
        cells = cells_of_slots(slots, self._heads, self._runner.slots).reshape(-1)
        self._runner.cells.restore(cells, tuple(arrays))
