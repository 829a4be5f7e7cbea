"""Sarathi: one chunk of a prompt per step, and as many decodes as there are ride along.

Source: Agrawal et al., "SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked
Prefills", 2023, arXiv 2308.16369, section 4: chunked prefills and decode-maximal batching. Its
successor is Sarathi-Serve, which cuts the chunks of several prompts to a latency budget.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import ScheduleState, StepPlan


@dataclass(frozen=True)
class Sarathi(SarathiServe):
    """Every step has one prompt's chunk, and all decodes; first come, first served.

    A prompt is finished before the next one starts. The chunk takes what the decodes leave of a
    multiple of ``tile`` rows: the largest within ``token_budget``, or the next one where the
    decodes alone exceed that, so that prompts always go on.

    What differs: the paper reserves the KV of the longest allowed request for each, and so many
    requests run as fit. Here answers take slots as they grow, and the latest are preempted where
    none is left; ``max_running`` is the paper's number of requests.

    Attributes:
        tile: rows of which a step's number is a multiple, but in a prompt's last chunk: on GPUs
            what the kernels cut products into.
    """

    tile: int = 32

    fixed_options: ClassVar[frozenset[str]] = frozenset({"gap", "short_share"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile < 1:
            raise ValueError("tile must be at least 1")

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        decodes = sum(sequence.decoding for sequence in state.running)
        current = next((each for each in state.running if not each.decoding), None)
        running = tuple(each for each in state.running if each.decoding or each is current)
        waiting = state.waiting[:1] if current is None and decodes < self.max_running else ()
        shown = replace(state, running=running, waiting=waiting, max_rows=None)
        one_chunk = replace(
            self, token_budget=self.rows(decodes), short_share=0.0, max_running=decodes + 1
        )
        return SarathiServe.plan(one_chunk, shown)

    def rows(self, decodes: int) -> int:
        """Return the rows of a step with a chunk beside so many decodes."""
        tiles = max(self.token_budget // self.tile, decodes // self.tile + 1)
        return tiles * self.tile
