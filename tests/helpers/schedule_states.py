"""States for tests of scheduling policies."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from midfill.engine.scheduling.scheduler import RunningSequence
from midfill.kv.radix_cache import CachedPrefix


@dataclass(frozen=True)
class CacheFacts:
    """A cache view that answers from given facts.

    Attributes:
        cached: by sequence id; others have nothing cached.
        common: length of the common prefix by pairs of sequence ids; 0 for other pairs.
        held: slots that preempting a sequence makes available; 0 for others.
        elsewhere: tokens that a method can take from other places, by sequence id; 0 for others.
    """

    cached: dict[int, CachedPrefix] = field(default_factory=dict)
    common: dict[tuple[int, int], int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    elsewhere: dict[int, int] = field(default_factory=dict)

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        return self.cached.get(sequence_id, CachedPrefix(0, 0))

    def found_elsewhere(self, sequence_id: int) -> int:
        return self.elsewhere.get(sequence_id, 0)

    def common_prefix(self, first: int, second: int) -> int:
        return self.common.get((first, second), 0)

    def released_by(self, victims: Sequence[int]) -> int:
        return sum(self.held.get(victim, 0) for victim in victims)


def decoding(sequence_id: int, length: int = 50) -> RunningSequence:
    return RunningSequence(sequence_id, length, length - 1, True)


def prefilling(sequence_id: int, length: int, computed: int = 0) -> RunningSequence:
    return RunningSequence(sequence_id, length, computed, False)
