"""Nexus: divide each step between prompts and answers, ahead of time, by what it will cost.

Source: Shi et al., "Nexus: Proactive Intra-GPU Disaggregation of Prefill and Decode in LLM
Serving", 2025, arXiv 2507.06608: its objective by KV usage, greedy search and hysteresis.

What is the paper's, and what differs. Nexus runs the two phases in two streams on shares of a GPU's
multiprocessors, which add up to 100 percent. This engine has one stream, whose pass uses every
core. So the shares are of a step's rows: with share R of ``token_budget`` rows, prompts have a
chunk of R percent of them beside the decodes. The paper predicts each phase's time from FLOPs and
bytes per operator, with a point of saturation that is fitted offline. Here the engine's own steps
are timed, by rows and context, and the estimate is interpolated between them: where the weights'
bandwidth bounds a step, it is as flat as the paper's maximum of compute and memory. The paper's
bandwidth of decodes beside a prefill has no counterpart: a pass reads the weights once for both
phases, and the estimate contains the chunk's context. The slack is larger, since a core that
computes a prompt is missed by the decodes, while half of a GPU hardly is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import ScheduleState, StepPlan
from midfill.engine.scheduling.step_cost import StepEstimate, estimate_steps

Seconds = Callable[[int], float]
"""The time of a phase by its share in percent: it never grows with the share."""

_SMALLEST_SHARE = 10


@dataclass(frozen=True)
class Nexus(SarathiServe):
    """Sarathi-Serve's steps, with a chunk as large as the phase that matters less can bear.

    While less than ``threshold`` of the KV pool is used, prompts come first: their share is the
    largest with which the gap between tokens stays within ``decode_slack`` times that without
    prompts. Above it, answers come first, which free KV as they end: the share is the smallest with
    which prompts take at most ``prefill_slack`` times as long as with whole steps. A new share is
    applied if it differs by more than ``hysteresis``. A phase that is alone has everything.

    Attributes:
        decode_slack, prefill_slack: the paper's beta (1.1) and alpha (1.3).
        threshold: share of the KV pool; the paper's is 0.7.
        hysteresis: percent; the paper's delta, whose value is not known here.
        share: percent; above 0, the share whatever steps cost, which is the baseline.
    """

    decode_slack: float = 4.0
    prefill_slack: float = 1.3
    threshold: float = 0.7
    hysteresis: int = 5
    share: int = 0

    fixed_options: ClassVar[frozenset[str]] = frozenset({"gap"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decode_slack >= 1 or not self.prefill_slack >= 1:
            raise ValueError("decode_slack and prefill_slack must be at least 1")
        if not 0 <= self.threshold <= 1 or self.hysteresis < 0:
            raise ValueError("threshold must be from 0 to 1, hysteresis at least 0")
        if not 0 <= self.share <= 100:
            raise ValueError("share must be from 0 to 100 percent")

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step, with the share that it gives prompts."""
        decodes = sum(sequence.decoding for sequence in state.running)
        share = self.prefill_share(state)
        if not decodes:
            return replace(super().plan(state), prefill_share=share)
        rows = decodes + self.chunk_rows(share)
        divided = replace(self, token_budget=rows)
        return replace(SarathiServe.plan(divided, state), prefill_share=share)

    def chunk_rows(self, share: int) -> int:
        """Return how many rows prompts have with a share."""
        return max(share * self.token_budget // 100, 1)

    def prefill_share(self, state: ScheduleState) -> int:
        """Return the share to apply, in percent: a new one if it differs enough from the last."""
        if self.share:
            return self.share
        last = state.prefill_share
        estimate = estimate_steps(state)
        if estimate is None or not estimate.decodes:
            return 50 if last is None else last
        found = self.best_share(state, estimate, 50 if last is None else last)
        return last if last is not None and abs(found - last) <= self.hysteresis else found

    def best_share(self, state: ScheduleState, estimate: StepEstimate, last: int) -> int:
        """Return the share that serves the phase that matters more, in percent.

        Args:
            state: the state.
            estimate: of its next step.
            last: the search starts there: states change little from step to step.
        """

        def decode_seconds(share: int) -> float:
            """Return the gap between tokens where decodes have a share."""
            rows = self.chunk_rows(100 - share) if share < 100 else 0
            return estimate.seconds(estimate.decodes + rows)

        def prefill_seconds(share: int) -> float:
            """Return the seconds per prompt token where prompts have a share."""
            if share == 100:
                return alone.seconds(self.token_budget) / self.token_budget
            rows = self.chunk_rows(share)
            return estimate.seconds(estimate.decodes + rows) / rows

        alone = replace(estimate, decodes=0, decode_keys=0)
        used = state.used_slots / state.total_slots if state.total_slots else 0.0
        if used < self.threshold:
            return adjust_share(last, decode_seconds, self.decode_slack)
        return 100 - adjust_share(100 - last, prefill_seconds, self.prefill_slack)


def adjust_share(share: int, other: Seconds, slack: float, smallest: int = _SMALLEST_SHARE) -> int:
    """Return the largest share of a phase that leaves the other one its slack, in percent.

    A greedy search: down until the other phase is fast enough, then up while it stays so. Where no
    share is small enough, it is the smallest.

    Args:
        share: where the search starts.
        other: the other phase's seconds by its own share.
        slack: how many times as long as alone it may take.
        smallest: share of either phase.
    """
    limit = slack * other(100)
    share = min(max(share, smallest), 100 - smallest)
    while share > smallest and other(100 - share) > limit:
        share -= 1
    while share < 100 - smallest and other(100 - share - 1) <= limit:
        share += 1
    return share
