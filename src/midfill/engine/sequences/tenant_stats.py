"""TenantCounters: what each tenant has used and is using of the engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from midfill.engine.request import TenantStats
from midfill.engine.sequences.sequence import Sequence


@dataclass(slots=True)
class _Counters:
    """Counters of one tenant; ``TenantStats`` documents each."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class TenantCounters:
    """Counters by tenant, from the engine's start. Background requests are not counted."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counters] = {}

    def record_admission(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence that has just been admitted for the first time."""
        counters = self._of(sequence)
        counters.prompt_tokens += sequence.prompt_length
        counters.cached_tokens += sequence.computed

    def record_tokens(self, sequence: Sequence, count: int) -> None:
        """Count generated tokens."""
        self._of(sequence).generated_tokens += count

    def stats(
        self, running: Iterable[Sequence], waiting: Mapping[str, int]
    ) -> dict[str, TenantStats]:
        """Return the numbers of every tenant that has or had a request.

        Args:
            running: the sequences that hold slots.
            waiting: how many of each tenant wait.
        """
        now_running = _count(running)
        tenants = dict.fromkeys((*self._counters, *waiting))
        none = _Counters()
        return {
            tenant: TenantStats(
                running=now_running.get(tenant, 0),
                waiting=waiting.get(tenant, 0),
                prompt_tokens=counters.prompt_tokens,
                cached_tokens=counters.cached_tokens,
                generated_tokens=counters.generated_tokens,
            )
            for tenant in tenants
            for counters in (self._counters.get(tenant, none),)
        }

    def _of(self, sequence: Sequence) -> _Counters:
        counters = self._counters.get(sequence.tenant)
        if counters is None:
            counters = self._counters[sequence.tenant] = _Counters()
        return counters


def _count(sequences: Iterable[Sequence]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sequence in sequences:
        counts[sequence.tenant] = counts.get(sequence.tenant, 0) + 1
    return counts
