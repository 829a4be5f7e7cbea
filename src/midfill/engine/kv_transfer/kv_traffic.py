"""KvTraffic: KV that goes from an engine's cache to elsewhere and back, between its steps."""

from midfill.engine.kv_transfer.kv_copies import KvCopies, layout_name
from midfill.engine.kv_transfer.kv_transfers import IdentitySource, KvTransfers
from midfill.engine.kv_transfer.warm_cache import WarmCache
from midfill.engine.request import TierStats
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.sequence import Sequence
from midfill.kv.blob import KvIdentity
from midfill.kv.tiers.warm_tier import WarmTier
from midfill.runners.forward.runner import Runner

_STEP_SHARE = 0.1  # of the last step's time, that copying may take between two steps
_WAIT_SECONDS = 0.002  # messages wait so long while there is nothing to do but to wait for KV


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
        if self._warm is None or kv is None or not kv.is_exact:
            return
        if kv.prefix is None and not kv.is_private:
            self._warm.note(sequence.tenant, sequence.cache_keys(sequence.computed))

    def record_step(self, rows: int, seconds: float) -> None:
        """Learn how fast the engine computes."""
        self._step_seconds = seconds
        if self._warm is not None:
            self._warm.record_step(rows, seconds)

    def step(self, *, may_wait: bool) -> None:
        """Copy a bounded part of the KV that is to be copied; queue sequences whose KV is there.

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
