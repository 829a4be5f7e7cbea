"""KvTransfers: exports and imports of cached KV, a bounded part of them between two steps.

Checksums are computed on a thread of their own, beside the steps. A request whose prompt begins
with tokens that are being imported waits for them, see ``awaits``.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from midfill.arrays import Int32Array
from midfill.engine.messages import TransferDone, TransferRefused
from midfill.kv.blob import (
    RAW,
    BlobError,
    KvBlob,
    KvIdentity,
    bind_tenant,
    chain,
    decode_blob,
)
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CacheRoot, RadixNode
from midfill.kv.ragged import cells_of_slots
from midfill.runners.forward.cells import UInt8Array
from midfill.runners.forward.runner import Runner

MAX_STEP_BYTES = 4 * 2**20
"""Copied at most at once: one to three milliseconds."""
_COPY_BYTES = 4 * 2**20  # joined at once
_NO_TOKENS = np.empty(0, np.int32)

TransferResult = TransferDone | TransferRefused


class NoRoomError(RuntimeError):
    """KV can't be put into the cache: slots are too few, or what comes before it was evicted."""


def layout_name(runner: Runner) -> str:
    """Return how a runner stores KV, for ``KvIdentity.layout``."""
    config = runner.config
    shape = f"{len(config.kv_layers)}x{config.kv_heads}x{config.head_dim}"
    return f"{runner.cells.layout.dtype} {shape}"


class KvCopies:
    """Copies KV between slots and bytes, between two steps.

    Args:
        runner: holds the KV.
        pool: its slots.
    """

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self._runner = runner
        self._pool = pool
        self._heads = len(runner.config.kv_layers) * runner.config.kv_heads
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


@dataclass(frozen=True)
class IdentitySource:
    """What blobs are bound to, found out when the first is needed.

    Attributes:
        find: returns the identity of the engine's KV; may read the checkpoint.
        scope: see ``bind_tenant``.
    """

    find: Callable[[], KvIdentity]
    scope: str = ""

    @cached_property
    def identity(self) -> KvIdentity:
        """The identity of KV as it was computed."""
        return self.find()


@dataclass(eq=False)
class _Export:
    transfer_id: str
    tenant: str
    tokens: Int32Array
    slots: Int32Array
    node: RadixNode | None
    start: int
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    done: int = 0
    result: Future[bytes] | None = None


@dataclass(eq=False)
class _Import:
    transfer_id: str
    tenant: str
    before: Int32Array
    decoded: Future[KvBlob]
    done: int = 0

    @property
    def tokens(self) -> Int32Array:
        """[n] int32: all tokens from position 0 on; known once it is decoded."""
        return np.concatenate((self.before, self.decoded.result().tokens))


class KvTransfers:
    """Transfers in progress. Belongs to one engine, which calls it between its steps.

    Args:
        copies: copies KV.
        pool: the engine's slots.
        source: what blobs are bound to.

    Attributes:
        exported_bytes, imported_bytes: KV that was transferred since the start.
    """

    def __init__(self, copies: KvCopies, pool: KVPool, source: IdentitySource) -> None:
        self.exported_bytes = self.imported_bytes = 0
        self._copies = copies
        self._pool = pool
        self._source = source
        self._exports: list[_Export] = []
        self._imports: list[_Import] = []
        self._results: list[TransferResult] = []
        self._changed = threading.Event()

    def __bool__(self) -> bool:
        """Whether any transfer is unfinished, or its result not taken."""
        return bool(self._exports or self._imports or self._results)

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="kv-transfer")

    def find(self, transfer_id: str, tenant: str, tokens: Int32Array) -> None:
        """Tell how many of [n] int32 ``tokens`` are cached, with ``TransferDone``."""
        self._results.append(TransferDone(transfer_id, self._copies.cached(tenant, tokens)))

    def start_export(
        self, transfer_id: str, tenant: str, tokens: Int32Array, start: int = 0
    ) -> None:
        """Export what is cached of [n] int32 ``tokens``; they stay cached meanwhile.

        Ends with ``TransferDone``, or with ``TransferRefused`` if nothing is cached.

        Args:
            transfer_id: is in the result.
            tenant: whose cache.
            tokens: from position 0 on.
            start: how many of them are left out.
        """
        found = self._pool.cache.match(tenant, tokens)
        if len(found) <= start:
            which = f"no token after the first {start}" if start else "none of these tokens"
            self._results.append(TransferRefused(transfer_id, f"{which} is cached"))
            return
        self._pool.cache.lock(found.node)
        held = tokens[: len(found)].copy()
        export = _Export(transfer_id, tenant, held, found.slots, found.node, start, done=start)
        self._exports.append(export)

    def start_import(
        self,
        transfer_id: str,
        tenant: str,
        content: bytes | memoryview,
        before: Int32Array = _NO_TOKENS,
    ) -> None:
        """Put an encoded blob's KV into a tenant's prefix cache.

        Ends with ``TransferDone``, also if room is found for a part of it only, or with
        ``TransferRefused`` if the blob can't be used.

        Args:
            transfer_id: is in the result.
            tenant: whose cache.
            content: the blob.
            before: [n] int32, the tokens before the blob's; they have to be cached.
        """
        decoded = self._worker.submit(self._decode, tenant, content, before)
        decoded.add_done_callback(lambda _: self._changed.set())
        self._imports.append(_Import(transfer_id, tenant, before, decoded))

    def end(self, transfer_id: str) -> None:
        """End a transfer without a result; what was imported stays cached."""
        for each in [transfer for transfer in self._exports if transfer.transfer_id == transfer_id]:
            if each.result is None:
                self._pool.cache.unlock(each.node)
            self._exports.remove(each)
        self._imports = [
            transfer for transfer in self._imports if transfer.transfer_id != transfer_id
        ]

    def awaits(self, tenant: str, tokens: Int32Array) -> bool:
        """Whether KV is being imported that a prompt of [n] int32 ``tokens`` would find cached."""
        return any(
            incoming.tenant == tenant and _is_open(incoming, tokens) for incoming in self._imports
        )

    def step(self, seconds: float = 0.0) -> None:
        """Continue the transfers, by MAX_STEP_BYTES, and by more if that takes less time.

        Args:
            seconds: that copying may take. Without it a transfer beside long steps would go on by
                MAX_STEP_BYTES for each of them.
        """
        started = time.perf_counter()
        while self._copy() and time.perf_counter() - started < seconds:
            pass

    def _copy(self) -> bool:
        """Copy at most MAX_STEP_BYTES; return whether there may be more to copy now."""
        left = max(MAX_STEP_BYTES // self._copies.token_bytes, 1)
        budget = left
        for incoming in list(self._imports):
            left -= self._continue_import(incoming, left)
        for export in list(self._exports):
            left -= self._continue_export(export, left)
        return left < budget

    def wait(self, seconds: float) -> None:
        """Sleep until a checksum is computed, at most for so long, if all waits for that."""
        ready = any(incoming.decoded.done() for incoming in self._imports)
        ready |= any(export.result is None or export.result.done() for export in self._exports)
        if not self._results and not ready:
            self._changed.wait(seconds)
        self._changed.clear()

    def take_results(self) -> list[TransferResult]:
        """Return the results that were not taken yet."""
        taken, self._results = self._results, []
        return taken

    def _continue_export(self, export: _Export, budget: int) -> int:
        """Copy at most ``budget`` tokens; return how many were."""
        if export.result is not None:
            if export.result.done():
                self._exports.remove(export)
                self._results.append(_exported(export))
            return 0
        count = min(budget, len(export.tokens) - export.done)
        if count <= 0:
            return 0
        export.parts.append(
            (count, self._copies.dump(export.slots[export.done : export.done + count]))
        )
        export.done += count
        self.exported_bytes += count * self._copies.token_bytes
        if export.done == len(export.tokens):
            self._pool.cache.unlock(export.node)
            export.result = self._worker.submit(self._encode, export)
            export.result.add_done_callback(lambda _: self._changed.set())
        return count

    def _continue_import(self, incoming: _Import, budget: int) -> int:
        """Copy at most ``budget`` tokens; return how many were."""
        if not incoming.decoded.done() or budget <= 0:
            return 0
        try:
            blob = incoming.decoded.result()
        except Exception as error:
            return self._end_import(incoming, TransferRefused(incoming.transfer_id, str(error)))
        tokens, start = incoming.tokens, blob.start
        incoming.done = max(incoming.done, start, self._copies.cached(incoming.tenant, tokens))
        count = min(budget, len(tokens) - incoming.done)
        try:
            if count:
                end = incoming.done + count
                self._copies.insert(
                    incoming.tenant, tokens[:end], incoming.done, blob, incoming.done - start
                )
                self.imported_bytes += count * self._copies.token_bytes
                incoming.done = end
        except NoRoomError:
            cached = self._copies.cached(incoming.tenant, tokens)
            return self._end_import(incoming, TransferDone(incoming.transfer_id, cached))
        if incoming.done == len(tokens):
            self._end_import(incoming, TransferDone(incoming.transfer_id, incoming.done))
        return count

    def _end_import(self, incoming: _Import, result: TransferResult) -> int:
        self._imports.remove(incoming)
        self._results.append(result)
        return 0

    def _encode(self, export: _Export) -> bytes:
        identity, tenant = self._source.identity, bind_tenant(export.tenant, self._source.scope)
        data = self._copies.join(export.parts)
        parent, start = identity.root(tenant), export.start
        if start:
            parent = chain(parent, export.tokens[:start])
        return KvBlob(identity, tenant, parent, start, export.tokens[start:], RAW, data).encode()

    def _decode(self, tenant: str, content: bytes | memoryview, before: Int32Array) -> KvBlob:
        blob = decode_blob(content)
        bound = bind_tenant(tenant, self._source.scope)
        blob.require(self._source.identity, bound)
        if blob.start != len(before):
            raise BlobError(f"the KV begins at token {blob.start}, not at {len(before)}")
        if blob.start and blob.parent != chain(self._source.identity.root(bound), before):
            raise BlobError("the KV follows other tokens")
        self._copies.check(blob)
        return blob


def _is_open(incoming: _Import, tokens: Int32Array) -> bool:
    """Whether an import may still bring something for ``tokens``."""
    if not incoming.decoded.done():
        return True
    if incoming.decoded.exception() is not None:
        return False
    imported = incoming.tokens
    span = min(len(imported), len(tokens))
    differs = np.flatnonzero(imported[:span] != tokens[:span])
    return (int(differs[0]) if len(differs) else span) > incoming.done


def _exported(export: _Export) -> TransferResult:
    assert export.result is not None
    try:
        blob = memoryview(export.result.result())
        return TransferDone(export.transfer_id, len(export.tokens) - export.start, blob)
    except Exception as error:
        return TransferRefused(export.transfer_id, str(error))
