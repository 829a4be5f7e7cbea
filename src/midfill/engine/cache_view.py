"""EngineCacheView: answers a policy's questions about the cache from the engine's state."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from midfill.engine.sequence import Sequence
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CachedPrefix


class EngineCacheView:
    """Implements scheduler.CacheView; reads, never writes."""

    def __init__(self, pool: KVPool, sequences: Mapping[int, Sequence]) -> None:
        """Look at ``pool`` on behalf of ``sequences``, the engine's by id."""
        self._pool = pool
        self._sequences = sequences

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        """What a queued sequence would find cached; its last token never counts, it must run."""
        sequence = self._sequences[sequence_id]
        return self._pool.cache.peek(sequence.tenant, sequence.tokens[:-1])

    def common_prefix(self, first: int, second: int) -> int:
        """How many leading tokens two sequences share; 0 for different tenants."""
        a, b = self._sequences[first], self._sequences[second]
        if a.tenant != b.tenant:
            return 0
        span = min(a.length, b.length)
        differs = a.tokens[:span] != b.tokens[:span]
        place = int(differs.argmax())
        return place if differs[place] else span

    def released_by(self, victims: SequenceOf[int]) -> int:
        """Slots that preempting these running sequences together would make available."""
        held = [kv for victim in victims if (kv := self._sequences[victim].kv) is not None]
        own = sum(kv.own for kv in held)
        return own + self._pool.cache.released_by(kv.node for kv in held)
