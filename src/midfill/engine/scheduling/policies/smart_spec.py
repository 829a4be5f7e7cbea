"""SmartSpec: run the drafts that maximise goodput.

Source: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using
Goodput", 2024, arXiv 2406.14066. Goodput is the expected number of tokens that a step generates,
divided by the step's time. The paper drafts equally many tokens for all sequences; here the
most likely drafted token of any sequence is added next, as long as goodput grows.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from midfill.engine.scheduling.scheduler import Chunk, ScheduleState, StepPlan


@dataclass(frozen=True)
class SmartSpec:
    """Adds drafts to a plan and changes nothing else in it.

    Drafts use what the plan leaves of the token budget and of the slots. A step that preempts runs
    none.

    Attributes:
        token_budget: maximum rows of a step with drafts.
        min_gain: share by which drafts have to raise the goodput. The best of many estimates tends
            to be an overestimate.
    """

    token_budget: int = 128
    min_gain: float = 0.05

    def max_draft_tokens(self, state: ScheduleState, plan: StepPlan) -> int:
        """Return how many drafted tokens could run beside ``plan``; below 1, none are proposed.

        It is what ``plan`` leaves of the token budget and of the slots. A pure function.
        """
        if plan.preempt:
            return 0
        return min(
            self.token_budget - plan.rows, state.available_slots - _allocated_slots(state, plan)
        )

    def add_drafts(
        self,
        state: ScheduleState,
        plan: StepPlan,
        probabilities: Mapping[int, Sequence[float]],
        step_seconds: Callable[[int, float], float],
        max_tokens: int,
    ) -> StepPlan:
        """Return ``plan`` with the drafts that maximise goodput; a pure function.

        Args:
            state: what ``plan`` was made from.
            plan: a plan without drafts.
            probabilities: by id of a sequence with a draft, the estimated probabilities that its
                first, first two, ... tokens are all right.
            step_seconds: estimates the time of a step from its rows (at least 1) and the tokens
                that a row attends to, on average.
            max_tokens: the result of ``max_draft_tokens``.
        """
        keys = _mean_keys(state, plan)
        lengths = draft_lengths(
            probabilities,
            rows=plan.rows,
            progress=len(plan.decodes) + len(plan.chunks) + len(plan.admit),
            seconds=lambda rows: step_seconds(rows, keys),
            max_tokens=max_tokens,
            min_gain=self.min_gain,
        )
        return replace(plan, drafts=tuple(Chunk(*item) for item in lengths.items()))


def draft_lengths(
    probabilities: Mapping[int, Sequence[float]],
    *,
    rows: int,
    progress: int,
    seconds: Callable[[int], float],
    max_tokens: int,
    min_gain: float = 0.0,
) -> dict[int, int]:
    """Return how many drafted tokens of each sequence maximise the tokens per second.

    Args:
        probabilities: by sequence id, the probabilities that its first, first two, ... drafted
            tokens are all right.
        rows: rows of the step without drafts.
        progress: number of sequences that the step advances; each counts as one token.
        seconds: time of a step by its rows.
        max_tokens: maximum number of drafted tokens in all.
        min_gain: see ``SmartSpec``.

    Returns:
        Lengths of at least 1, by sequence id.
    """
    heap = [(-values[0], sequence_id, 0) for sequence_id, values in probabilities.items() if values]
    heapq.heapify(heap)
    taken: list[int] = []
    best_count = 0
    expected = float(progress)
    best = (1.0 + min_gain) * expected / seconds(rows) if heap else 0.0
    while heap and len(taken) < max_tokens:
        negated, sequence_id, place = heapq.heappop(heap)
        taken.append(sequence_id)
        expected -= negated
        goodput = expected / seconds(rows + len(taken))
        if goodput > best:
            best, best_count = goodput, len(taken)
        values = probabilities[sequence_id]
        if place + 1 < len(values):
            heapq.heappush(heap, (-values[place + 1], sequence_id, place + 1))
    return dict(Counter(taken[:best_count]))


def _allocated_slots(state: ScheduleState, plan: StepPlan) -> int:
    """Return how many of the available slots ``plan`` uses."""
    allocated = len(plan.decodes)
    if plan.admit:
        waiting = {sequence.sequence_id: sequence for sequence in state.waiting}
        for chunk in plan.admit:
            cached = state.cache.cached_prefix(chunk.sequence_id)
            allocated += waiting[chunk.sequence_id].needs(cached)
    return allocated


def _mean_keys(state: ScheduleState, plan: StepPlan) -> float:
    """Return how many tokens a row of ``plan`` attends to, on average."""
    running = {sequence.sequence_id: sequence for sequence in state.running}
    keys = sum(running[sequence_id].length for sequence_id in plan.decodes)
    for chunk in plan.chunks:
        keys += chunk.tokens * (running[chunk.sequence_id].computed + chunk.tokens)
    for chunk in plan.admit:
        cached = state.cache.cached_prefix(chunk.sequence_id).tokens
        keys += chunk.tokens * (cached + chunk.tokens)
    return keys / max(1, plan.rows)
