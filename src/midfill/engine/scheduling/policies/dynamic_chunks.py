"""DynamicChunks: Sarathi-Serve with chunks that shrink as a prompt's context grows.

Source: the published code of Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference
with Sarathi-Serve", OSDI 2024, arXiv 2403.02310; off by default there. A later chunk attends to
more tokens: with fewer rows, steps take about as long as with the first one.
"""

from dataclasses import dataclass
from typing import ClassVar

from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import ScheduleState


@dataclass(frozen=True)
class DynamicChunks(SarathiServe):
    """Sarathi-Serve's steps; a prompt's chunks have sizes that fall from stage to stage.

    A chunk of stage i has ``token_budget`` tokens less i equal parts of what leads to ``smallest``,
    and the step's other rows count towards it. ``gap`` of ``SarathiServe`` reaches the same with
    measured costs.

    Attributes:
        smallest: tokens of the last stage's chunks.
        stages: how many sizes there are.
        last_stage: tokens of context from which on chunks are the smallest.
    """

    smallest: int = 32
    stages: int = 4
    last_stage: int = 4096

    fixed_options: ClassVar[frozenset[str]] = frozenset({"gap"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smallest < 1 or self.stages < 1 or self.last_stage < 1:
            raise ValueError("smallest, stages and last_stage must be at least 1")

    def chunk_size(self, computed: int) -> int:
        """Return the tokens of a chunk that follows ``computed`` tokens of its prompt."""
        if self.stages == 1 or self.token_budget <= self.smallest:
            return self.token_budget
        per_stage = -(-self.last_stage // (self.stages - 1))
        stage = min(computed // per_stage, self.stages - 1)
        return self.token_budget - (self.token_budget - self.smallest) * stage // (self.stages - 1)

    def _chunk(self, state: ScheduleState, computed: int, remaining: int, rows: int) -> int:
        tokens = super()._chunk(state, computed, remaining, rows)
        return max(min(tokens, self.chunk_size(computed) - rows), 0)
