"""MemoryCentric: admit as long as KV memory allows, with a reserve for what runs.

Source: Zheng et al., "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing
and Throughput-oriented Token Batching", 2024, arXiv 2412.03594, its memory-centric token batching:
used + new prompt + reserve <= theta * total bounds admission, and not a number of requests. For
batches of requests that nobody waits for one by one. The paper's theta and reserve are not known
here; the defaults are choices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import Chunk, ScheduleState


@dataclass(frozen=True)
class MemoryCentric(SarathiServe):
    """Sarathi-Serve's steps with another bound to admission.

    Sarathi-Serve admits what fits now, and preempts when answers grow beyond the pool: their work
    is done twice. Here what is admitted leaves room for the growth of the next steps. The token
    budget bounds a step's rows and nothing else does: steps may take long.

    Attributes:
        max_used: share of the pool beyond which nothing is admitted: theta. A request is always
            admitted where nothing else runs.
        reserve_steps: for how many further tokens of each running answer slots are left.
    """

    max_used: float = 0.95
    reserve_steps: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.max_used <= 1 or self.reserve_steps < 0:
            raise ValueError(
                "max_used must be above 0 and at most 1, reserve_steps must be at least 0"
            )

    def admit(
        self,
        state: ScheduleState,
        prefilling: Iterable[int],
        rows: int,
        available: int,
        decodes: int,
        queue: Sequence[int] = (),
    ) -> list[Chunk]:
        """Return new sequences to start; see ``SarathiServe.admit``."""
        if not state.running:
            admitted = super().admit(state, prefilling, rows, available, decodes, queue)
            return admitted[:1]
        kept = int((1.0 - self.max_used) * state.total_slots)
        reserve = self.reserve_steps * (len(state.running) + 1)
        left = available - kept - reserve
        return super().admit(state, prefilling, rows, left, decodes, queue)

    def _budget(self, state: ScheduleState) -> int:
        return self.token_budget
