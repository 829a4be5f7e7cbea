"""WarmCache: the engine's side of the warm tier (``kv.tiers.warm_tier``).

What prompts and answers leave in the prefix cache is handed to the tier chunk by chunk: while the
engine is idle or, where it doesn't become idle for a while, beside its steps for a small share of
their time. So a document that is at rest is stored, what is evicted later has its copy, and the
steps of an answer to a keystroke are left alone. A new request whose KV the tier holds, and the
cache doesn't, waits while it is loaded, if that takes less time than computing it
(``kv.tiers.load_policy``), and never much longer: what hasn't come by then is computed.
"""

import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from midfill.arrays import Int32Array
from midfill.config import WarmTierOptions
from midfill.engine.kv_transfer.transfers import (
    MAX_STEP_BYTES,
    IdentitySource,
    KvCopies,
    KvTransfers,
    NoRoomError,
    layout_name,
)
from midfill.engine.request import TierStats
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.sequence import Sequence
from midfill.errors import OptionError
from midfill.kv.blob import RAW, BlobError, KvBlob, KvIdentity, bind_tenant, chain
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CacheRoot, MethodRoot
from midfill.kv.tiers.folders import ChunkFolder, open_disk_folder
from midfill.kv.tiers.load_policy import MeasuredRate, chunks_to_load, patience
from midfill.kv.tiers.warm_tier import ChunkCodec, TierLoad, WantedChunk, WarmTier
from midfill.runners.forward.runner import Runner
from midfill.system.cache import cache_folder

CHUNK_TOKENS = 64
"""Tokens per chunk: what is left at a text's end, and computed, is at most one small step."""
_MAX_NOTES = 256
_BUSY_SHARE = 0.05  # of the time of steps, to copy chunks beside them
_BUSY_SECONDS = 0.5  # before texts are stored beside steps: most engines are idle by then
_MAX_CREDIT = 0.05  # seconds that may add up
_MIN_PREFILL_ROWS = 32  # of steps that tell how fast prompts are computed
_UNKNOWN_SECONDS = 1.0  # to compute a chunk, before the first measurement

_STEP_SHARE = 0.1  # of the last step's time, that copying may take between two steps
_WAIT_SECONDS = 0.002  # messages wait so long while there is nothing to do but to wait for KV


def open_warm_tier(
    options: WarmTierOptions,
    source: IdentitySource,
    runner: Runner,
    codec: ChunkCodec | None = None,
) -> WarmTier | None:
    """Open the tier that an engine's options ask for; None if they ask for none.

    Args:
        options: where KV is kept.
        source: what the KV is bound to.
        runner: computes the KV.
        codec: how KV is written; None writes it as it is.

    Raises:
        OptionError: a folder is given too little for a chunk.
        MidfillError: a folder can't be used.
    """
    if not options.memory and not options.disk:
        return None
    chunk_bytes = KvCopies(runner, KVPool(1)).token_bytes * CHUNK_TOKENS
    for name, size in (("memory", options.memory), ("disk", options.disk)):
        if 0 < size < 2 * chunk_bytes:
            raise OptionError(
                f"--warm-tier-{name} is {size} bytes, but KV is kept in chunks of {CHUNK_TOKENS}"
                f" tokens, {chunk_bytes} bytes each for this model; give it many times as much"
            )
    identity = source.identity
    if codec is not None:
        identity = dataclasses.replace(identity, variant=codec.name)
    memory = disk = None
    if options.memory and options.memory_folder is not None:
        memory = ChunkFolder(Path(options.memory_folder), options.memory, durable=False)
    if options.disk:
        folder = cache_folder() / "kv" if options.folder is None else Path(options.folder)
        disk = open_disk_folder(folder.expanduser(), identity.name, options.disk)
    return WarmTier(identity, memory=memory, disk=disk, codec=codec)


@dataclass(eq=False)
class _Note:
    """Tokens that were in the cache since a time, and the keys of chunks that were looked at."""

    tenant: str
    tokens: Int32Array
    root: bytes
    since: float
    keys: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class _Loading:
    """A sequence's KV on its way: ``done`` tokens are cached."""

    sequence: Sequence
    tokens: Int32Array
    root: CacheRoot
    load: TierLoad
    done: int
    deadline: float


class WarmCache:
    """Stores cached KV in a tier and loads it from there. Belongs to one engine.

    Args:
        tier: where KV is stored.
        copies: copies KV.
        pool: the engine's slots.
        source: what the KV is bound to.
    """

    def __init__(
        self, tier: WarmTier, copies: KvCopies, pool: KVPool, source: IdentitySource
    ) -> None:
        self._tier = tier
        self._copies = copies
        self._pool = pool
        self._source = source
        self._notes: deque[_Note] = deque()
        self._loading: dict[int, _Loading] = {}
        self._prefill, self._import = MeasuredRate(), MeasuredRate()
        self._credit = 0.0
        self._loaded_tokens = self._stored_tokens = 0
        self._variant = tier.identity.variant

    @property
    def is_loading(self) -> bool:
        """Whether any sequence waits for KV."""
        return bool(self._loading)

    @property
    def can_store(self) -> bool:
        """Whether there is something to store, and the tier takes it."""
        return bool(self._notes) and not self._tier.is_full

    def __bool__(self) -> bool:
        """Whether there is anything to store or to load."""
        return bool(self._notes or self._loading)

    def stats(self) -> TierStats:
        """Return gauges and counters as of now."""
        counts, folders = self._tier.counts, self._tier.folders
        return TierStats(
            used_bytes={name: folder.used_bytes for name, folder in folders.items()},
            capacity_bytes={name: folder.capacity for name, folder in folders.items()},
            loaded_chunks={name: counts.loaded_chunks[name] for name in folders},
            evicted_chunks={name: folder.evicted_chunks for name, folder in folders.items()},
            loaded_tokens=self._loaded_tokens,
            stored_tokens=self._stored_tokens,
            rejected_chunks=counts.rejected_chunks,
            failed_writes=counts.failed_writes,
            dropped_chunks=counts.dropped_chunks,
        )

    # --- storing ---

    def note(self, tenant: str, tokens: Int32Array) -> None:
        """Have what is cached of [n] int32 ``tokens`` stored soon."""
        if len(tokens) < CHUNK_TOKENS:
            return
        last = self._notes[-1] if self._notes else None
        if last is not None and last.tenant == tenant and _begins_with(tokens, last.tokens):
            last.tokens = tokens.copy()
            return
        self._notes.append(_Note(tenant, tokens.copy(), self._root(tenant), time.monotonic()))
        if len(self._notes) > _MAX_NOTES:
            self._notes.popleft()

    def record_step(self, rows: int, seconds: float) -> None:
        """Learn from a step how fast prompts are computed, and how much time storing may take."""
        if rows >= _MIN_PREFILL_ROWS:
            self._prefill.record(rows, seconds)
        self._credit = min(self._credit + _BUSY_SHARE * seconds, _MAX_CREDIT)

    def store(self, *, idle: bool) -> None:
        """Hand chunks to the tier.

        Args:
            idle: whether no request waits for it. The latest prompts' chunks go first then,
                otherwise those of prompts that have waited longest, if that was for a while.
        """
        budget = max(MAX_STEP_BYTES // self._copies.token_bytes, 1)
        started = time.perf_counter()
        while self._notes and budget > 0 and not self._tier.is_full:
            if not idle and (self._credit <= 0 or self._notes[0].since > self._busy_before()):
                break
            budget -= self._store_next(self._notes[-1 if idle else 0])
            now = time.perf_counter()
            self._credit -= 0.0 if idle else now - started
            started = now

    def _busy_before(self) -> float:
        """Return when the latest texts came that may be stored beside steps."""
        return time.monotonic() - _BUSY_SECONDS

    def _store_next(self, note: _Note) -> int:
        """Store the next chunk of a text that isn't stored; return how many tokens were copied."""
        while (end := (len(note.keys) + 1) * CHUNK_TOKENS) <= len(note.tokens):
            start = end - CHUNK_TOKENS
            tokens = note.tokens[start:end]
            parent = note.keys[-1] if note.keys else note.root
            note.keys.append(chain(parent, tokens))
            if note.keys[-1] in self._tier:
                continue
            slots = self._pool.cache.find(note.tenant, note.tokens[:end])
            if len(slots) < end:
                self._tier.counts.dropped_chunks += 1
                break
            self._tier.store(
                KvBlob(
                    identity=self._tier.identity,
                    tenant=bind_tenant(note.tenant, self._source.scope),
                    parent=parent,
                    start=start,
                    tokens=tokens,
                    codec=RAW,
                    data=self._copies.dump(slots[start:]),
                ),
                note.keys[:-1],
            )
            self._stored_tokens += CHUNK_TOKENS
            return CHUNK_TOKENS
        self._tier.touch(note.keys)
        self._notes.remove(note)
        return 0

    # --- loading ---

    def start_loading(self, sequence: Sequence) -> bool:
        """Load a new sequence's KV if that is cheaper than computing it; return whether it is.

        KV that a codec has changed goes to a tree of its own, and so does all that the sequence
        computes after it.
        """
        tokens, tenant, variant = sequence.matchable_tokens, sequence.tenant, self._variant
        exact = self._copies.cached(tenant, tokens)
        left = len(tokens) - exact
        if left < CHUNK_TOKENS or (variant and not _takes_any(sequence)):
            return False
        root = MethodRoot(tenant, variant) if variant else tenant
        cached = self._copies.cached(root, tokens) if variant else exact
        if cached - exact > left * 3 // 4:
            sequence.loaded_variant = variant
            return False
        if self._tier.is_stalled:
            return False
        wanted = self._stored_chunks(tenant, tokens, cached)
        each = self._prefill.seconds(CHUNK_TOKENS)
        each = _UNKNOWN_SECONDS if each is None else each
        missing = [
            min(max(chunk.start + CHUNK_TOKENS - exact, 0), CHUNK_TOKENS) for chunk in wanted
        ]
        compute = [each * tokens / CHUNK_TOKENS for tokens in missing]
        count = chunks_to_load([self._load_seconds(chunk.key) for chunk in wanted], compute)
        if not count:
            return False
        deadline = time.monotonic() + patience(sum(compute[:count]))
        load = self._tier.load(wanted[:count])
        sequence.loaded_variant = variant
        self._loading[sequence.sequence_id] = _Loading(
            sequence, tokens.copy(), root, load, cached, deadline
        )
        return True

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a sequence's KV is on its way."""
        return sequence.sequence_id in self._loading

    def forget(self, sequence: Sequence) -> None:
        """Load no more for a sequence."""
        loading = self._loading.pop(sequence.sequence_id, None)
        if loading is not None:
            loading.load.cancel()

    def load(self) -> None:
        """Put what has arrived into the cache, a bounded part of it."""
        budget = max(MAX_STEP_BYTES // self._copies.token_bytes, 1)
        for sequence_id, loading in list(self._loading.items()):
            finished = loading.load.finished  # before looking at what has arrived
            try:
                while loading.load.arrived and budget > 0:
                    budget -= self._take(loading, loading.load.take())
            except (BlobError, NoRoomError):
                loading.load.arrived.clear()
                finished = True
            if (finished and not loading.load.arrived) or time.monotonic() > loading.deadline:
                loading.load.cancel()
                del self._loading[sequence_id]
                self._end(loading)

    def _end(self, loading: _Loading) -> None:
        """Have a sequence use its tenant's own tree if that holds as much."""
        if loading.done <= self._copies.cached(loading.sequence.tenant, loading.tokens):
            loading.sequence.loaded_variant = ""

    def wait(self, seconds: float) -> None:
        """Sleep until something arrives or is written, at most for so long."""
        if not any(
            loading.load.arrived or loading.load.finished for loading in self._loading.values()
        ):
            self._tier.changed.wait(seconds)
        self._tier.changed.clear()

    def flush(self, seconds: float) -> None:
        """Wait until what was handed over is written, for at most so long."""
        self._tier.flush(seconds)

    def close(self, seconds: float) -> None:
        """Write what was handed over, for at most so long, and close the tier."""
        self._tier.flush(seconds)
        self._tier.close()

    def _take(self, loading: _Loading, blob: KvBlob) -> int:
        """Put a chunk into the cache; return how many tokens were copied.

        Raises:
            BlobError, NoRoomError: it doesn't go there.
        """
        started = time.perf_counter()
        self._copies.check(blob)
        end = blob.start + len(blob.tokens)
        loading.done = max(loading.done, self._copies.cached(loading.root, loading.tokens[:end]))
        if loading.done >= end:
            return 0
        count = end - loading.done
        self._copies.insert(
            loading.root, loading.tokens[:end], loading.done, blob, loading.done - blob.start
        )
        loading.done = end
        self._loaded_tokens += count
        self._import.record(count, time.perf_counter() - started)
        return count

    def _stored_chunks(self, tenant: str, tokens: Int32Array, cached: int) -> list[WantedChunk]:
        """Return the chunks after what is cached, as far as the tier holds them."""
        binding, key = bind_tenant(tenant, self._source.scope), self._root(tenant)
        wanted: list[WantedChunk] = []
        for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            part = tokens[start : start + CHUNK_TOKENS]
            parent, key = key, chain(key, part)
            if start + CHUNK_TOKENS <= cached:
                continue
            if self._tier.place(key) is None:
                break
            wanted.append(WantedChunk(key, binding, parent, start, part.copy()))
        return wanted

    def _load_seconds(self, key: bytes) -> float:
        """Return how long it takes to load a chunk, as far as it is known."""
        place = self._tier.place(key)
        size = CHUNK_TOKENS * self._copies.token_bytes
        read = None if place is None else self._tier.rates[place].seconds(size)
        return (read or 0.0) + (self._import.seconds(CHUNK_TOKENS) or 0.0)

    def _root(self, tenant: str) -> bytes:
        return self._tier.identity.root(bind_tenant(tenant, self._source.scope))


def _takes_any(sequence: Sequence) -> bool:
    """Whether a sequence has no method that expects KV as it was computed, or reads all of it."""
    return sequence.method.is_null and sequence.prompt_logprobs is None


def _begins_with(tokens: Int32Array, beginning: Int32Array) -> bool:
    count = len(beginning)
    return len(tokens) >= count and np.array_equal(tokens[:count], beginning)


class KvTraffic:
    """Transfers and the warm tier of one engine.

    Attributes:
        transfers: exports and imports.
    """

    def __init__(
        self,
        runner: Runner,
        queues: RequestQueues,
        source: IdentitySource | None,
        tier: WarmTier | None,
    ) -> None:
        """Start nothing yet.

        Args:
            runner: holds the KV.
            queues: the engine's sequences and slots.
            source: what KV is bound to; None binds it to the runner's layout alone.
            tier: keeps KV that may be evicted; None keeps none.
        """
        if source is None:
            source = IdentitySource(lambda: KvIdentity("", layout_name(runner)))
        copies = KvCopies(runner, queues.pool)
        self.transfers = KvTransfers(copies, queues.pool, source)
        self._queues = queues
        self._warm = None if tier is None else WarmCache(tier, copies, queues.pool, source)
        queues.on_release = self.note
        self._step_seconds = 0.0

    def __bool__(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self.transfers or self._warm or self._queues.loading)

    def tier_stats(self) -> TierStats | None:
        """Return what the warm tier holds and did; None without one."""
        return None if self._warm is None else self._warm.stats()

    def starts_loading(self, sequence: Sequence) -> bool:
        """Return whether a new sequence has to wait for KV; have it loaded, if it can be."""
        if sequence.background or not isinstance(sequence.cache_root, str):
            return False
        if self.transfers.awaits(sequence.tenant, sequence.matchable_tokens):
            return True
        return self._warm is not None and self._warm.start_loading(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Load no more for a sequence that ends."""
        if self._warm is not None:
            self._warm.forget(sequence)

    def note(self, sequence: Sequence) -> None:
        """Have the warm tier store what a sequence has in the cache, or is about to leave there."""
        kv = sequence.kv
        if self._warm is None or kv is None or not kv.is_exact or kv.low_priority:
            return
        if kv.prefix is None and not kv.is_private:
            self._warm.note(sequence.tenant, sequence.cache_keys(sequence.computed))

    def record_step(self, rows: int, seconds: float) -> None:
        """Learn how fast the engine computes."""
        self._step_seconds = seconds
        if self._warm is not None:
            self._warm.record_step(rows, seconds)

    def step(self, *, may_wait: bool) -> None:
        """Copy some of the KV that is to be copied; queue the sequences that have all of theirs.

        Args:
            may_wait: sleep for a moment if there is nothing to copy yet, and nothing to run.
        """
        queues = self._queues
        if may_wait and len(queues.sequences) == len(queues.loading):
            self._wait()
        self.transfers.step(_STEP_SHARE * self._step_seconds)
        if self._warm is not None:
            self._warm.load()
            self._warm.store(idle=not queues.running and not queues.waiting)
        if queues.loading:
            queues.queue_loaded(self._is_loading)

    def flush(self, seconds: float) -> None:
        """Wait until what the warm tier was given is written, for at most so long."""
        if self._warm is not None:
            self._warm.flush(seconds)

    def close(self, seconds: float) -> None:
        """Write what the warm tier was given, for at most so long, and close it."""
        if self._warm is not None:
            self._warm.close(seconds)

    def _is_loading(self, sequence: Sequence) -> bool:
        if self._warm is not None and self._warm.awaits(sequence):
            return True
        return self.transfers.awaits(sequence.tenant, sequence.matchable_tokens)

    def _wait(self) -> None:
        if self.transfers:
            self.transfers.wait(_WAIT_SECONDS)
        elif self._warm is not None and not self._warm.can_store:
            self._warm.wait(_WAIT_SECONDS)
