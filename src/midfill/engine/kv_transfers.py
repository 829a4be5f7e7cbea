"""KvTransfers: exports and imports of cached KV, a bounded part of them between two steps.

Checksums are computed on a thread of their own, beside the steps. A request whose prompt begins
with tokens that are being imported waits for them, see ``awaits``.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from midfill.arrays import Int32Array
from midfill.engine.kv_copies import KvCopies, NoRoomError
from midfill.kv.blob import RAW, BlobError, KvBlob, KvIdentity, bind_tenant, decode_blob
from midfill.kv.pool import KVPool
from midfill.kv.radix_node import RadixNode

MAX_STEP_BYTES = 4 * 2**20
"""Copied at most at once: one to three milliseconds."""


@dataclass(frozen=True)
class Exported:
    """An export is complete: an encoded ``KvBlob``, and how many tokens it holds."""

    transfer_id: str
    blob: bytes
    tokens: int


@dataclass(frozen=True)
class Imported:
    """An import is complete: how many tokens are cached now, from the first on."""

    transfer_id: str
    tokens: int


@dataclass(frozen=True)
class TransferFailed:
    """An export or import came to nothing."""

    transfer_id: str
    reason: str


TransferResult = Exported | Imported | TransferFailed


@dataclass(eq=False)
class TransferCounts:
    """What was transferred since the start, in bytes of KV."""

    exported_bytes: int = 0
    imported_bytes: int = 0


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
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    done: int = 0
    result: Future[bytes] | None = None


@dataclass(eq=False)
class _Import:
    transfer_id: str
    tenant: str
    decoded: Future[KvBlob]
    done: int = 0


class KvTransfers:
    """Transfers in progress. Belongs to one engine, which calls it between its steps.

    Args:
        copies: copies KV.
        pool: the engine's slots.
        source: what blobs are bound to.
    """

    def __init__(self, copies: KvCopies, pool: KVPool, source: IdentitySource) -> None:
        self.counts = TransferCounts()
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

    def start_export(self, transfer_id: str, tenant: str, tokens: Int32Array) -> None:
        """Export what is cached of [n] int32 ``tokens``; they stay cached meanwhile.

        Ends with ``Exported``, or with ``TransferFailed`` if nothing is cached.
        """
        found = self._pool.cache.match(tenant, tokens)
        if not len(found):
            self._results.append(TransferFailed(transfer_id, "none of these tokens is cached"))
            return
        self._pool.cache.lock(found.node)
        held = tokens[: len(found)].copy()
        self._exports.append(_Export(transfer_id, tenant, held, found.slots, found.node))

    def start_import(self, transfer_id: str, tenant: str, content: bytes | memoryview) -> None:
        """Put an encoded blob's KV into a tenant's prefix cache.

        Ends with ``Imported``, also if room is found for a part of it only, or with
        ``TransferFailed`` if the blob can't be used.
        """
        decoded = self._worker.submit(self._decode, tenant, content)
        decoded.add_done_callback(lambda _: self._changed.set())
        self._imports.append(_Import(transfer_id, tenant, decoded))

    def end(self, transfer_id: str) -> None:
        """End a transfer without a result; what was imported stays cached."""
        for each in [one for one in self._exports if one.transfer_id == transfer_id]:
            if each.result is None:
                self._pool.cache.unlock(each.node)
            self._exports.remove(each)
        self._imports = [one for one in self._imports if one.transfer_id != transfer_id]

    def awaits(self, tenant: str, tokens: Int32Array) -> bool:
        """Whether KV is being imported that a prompt of [n] int32 ``tokens`` would find cached."""
        return any(one.tenant == tenant and _is_open(one, tokens) for one in self._imports)

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
        for one in list(self._imports):
            left -= self._continue_import(one, left)
        for each in list(self._exports):
            left -= self._continue_export(each, left)
        return left < budget

    def wait(self, seconds: float) -> None:
        """Sleep until a checksum is computed, at most for so long, if all waits for that."""
        ready = any(one.decoded.done() for one in self._imports)
        ready |= any(one.result is None or one.result.done() for one in self._exports)
        if not self._results and not ready:
            self._changed.wait(seconds)
        self._changed.clear()

    def take_results(self) -> list[TransferResult]:
        """Return the results that were not taken yet."""
        taken, self._results = self._results, []
        return taken

    def _continue_export(self, one: _Export, budget: int) -> int:
        """Copy at most ``budget`` tokens; return how many were."""
        if one.result is not None:
            if one.result.done():
                self._exports.remove(one)
                self._results.append(_exported(one))
            return 0
        count = min(budget, len(one.tokens) - one.done)
        if count <= 0:
            return 0
        one.parts.append((count, self._copies.dump(one.slots[one.done : one.done + count])))
        one.done += count
        self.counts.exported_bytes += count * self._copies.token_bytes
        if one.done == len(one.tokens):
            self._pool.cache.unlock(one.node)
            one.result = self._worker.submit(self._encode, one)
            one.result.add_done_callback(lambda _: self._changed.set())
        return count

    def _continue_import(self, one: _Import, budget: int) -> int:
        """Copy at most ``budget`` tokens; return how many were."""
        if not one.decoded.done() or budget <= 0:
            return 0
        try:
            blob = one.decoded.result()
        except Exception as error:
            return self._end_import(one, TransferFailed(one.transfer_id, str(error)))
        one.done = max(one.done, self._copies.cached(one.tenant, blob.tokens))
        count = min(budget, len(blob.tokens) - one.done)
        try:
            if count:
                end = one.done + count
                self._copies.insert(one.tenant, blob.tokens[:end], one.done, blob, one.done)
                self.counts.imported_bytes += count * self._copies.token_bytes
                one.done = end
        except NoRoomError:
            cached = self._copies.cached(one.tenant, blob.tokens)
            return self._end_import(one, Imported(one.transfer_id, cached))
        if one.done == len(blob.tokens):
            self._end_import(one, Imported(one.transfer_id, one.done))
        return count

    def _end_import(self, one: _Import, result: TransferResult) -> int:
        self._imports.remove(one)
        self._results.append(result)
        return 0

    def _encode(self, one: _Export) -> bytes:
        identity, tenant = self._source.identity, bind_tenant(one.tenant, self._source.scope)
        data = self._copies.join(one.parts)
        parent = identity.root(tenant)
        return KvBlob(identity, tenant, parent, 0, one.tokens, RAW, data).encode()

    def _decode(self, tenant: str, content: bytes | memoryview) -> KvBlob:
        blob = decode_blob(content)
        blob.require(self._source.identity, bind_tenant(tenant, self._source.scope))
        if blob.start:
            raise BlobError(f"the KV begins at token {blob.start}, not at the first")
        self._copies.check(blob)
        return blob


def _is_open(one: _Import, tokens: Int32Array) -> bool:
    """Whether an import may still bring something for ``tokens``."""
    if not one.decoded.done():
        return True
    if one.decoded.exception() is not None:
        return False
    blob = one.decoded.result().tokens
    span = min(len(blob), len(tokens))
    differs = np.flatnonzero(blob[:span] != tokens[:span])
    return (int(differs[0]) if len(differs) else span) > one.done


def _exported(one: _Export) -> TransferResult:
    assert one.result is not None
    try:
        return Exported(one.transfer_id, one.result.result(), len(one.tokens))
    except Exception as error:
        return TransferFailed(one.transfer_id, str(error))
