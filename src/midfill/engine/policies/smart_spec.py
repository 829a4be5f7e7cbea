"""SmartSpec: draft as many tokens as make the step's goodput highest; any other policy does the
rest.

Source: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using
Goodput", 2024, arXiv 2406.14066. Goodput is the number of tokens a step is expected to generate
over the time it takes. The paper gives all sequences drafts of one length; here the likeliest
token of any of them is taken next, until another one would not pay.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from midfill.engine.scheduler import Chunk, SchedulerPolicy, ScheduleState, StepPlan


@dataclass(frozen=True)
class SmartSpec:
    """Adds drafts to another policy's plan; never changes what it decided.

    Drafts take what the plan leaves of the token budget and of the slots, and there are none in a
    step that preempts.

    Attributes:
        ordinary: plans everything else.
        token_budget: most rows of a step with drafts.
        least_gain: share by which drafts have to raise the goodput. The choice is of the highest
            of many estimates, which tends to be one that is too high.
    """

    ordinary: SchedulerPolicy
    token_budget: int = 128
    least_gain: float = 0.05

    def plan(self, state: ScheduleState) -> StepPlan:
        """Plan one step."""
        plan = self.ordinary.plan(state)
        if state.drafts is None or plan.preempt:
            return plan
        taken = len(plan.decodes)
        for chunk in plan.admit:
            cached = state.cache.cached_prefix(chunk.sequence_id)
            taken += cached.evictable + _length(state, chunk) - cached.tokens
        room = min(self.token_budget - plan.rows, state.available_slots - taken)
        if room < 1:
            return plan
        lengths = draft_lengths(
            {
                sequence_id: state.drafts.chances(sequence_id)
                for sequence_id in _sampled(state, plan)
            },
            rows=plan.rows,
            progress=len(plan.decodes) + len(plan.chunks) + len(plan.admit),
            seconds=partial(state.drafts.seconds, context=_context(state, plan)),
            room=room,
            least_gain=self.least_gain,
        )
        return replace(plan, drafts=tuple(Chunk(*item) for item in lengths.items()))


def draft_lengths(
    chances: Mapping[int, Sequence[float]],
    *,
    rows: int,
    progress: int,
    seconds: Callable[[int], float],
    room: int,
    least_gain: float = 0.0,
) -> dict[int, int]:
    """How many draft tokens of each sequence give the most tokens a second.

    Args:
        chances: by sequence, the probabilities that its first, first two, ... are all right.
        rows: of the step without drafts.
        progress: sequences that it takes further; each counts for a token.
        seconds: time of a step by its rows.
        room: most draft tokens in all.
        least_gain: see ``SmartSpec``.

    Returns:
        Lengths of at least 1, by sequence.
    """
    heap = [(-values[0], sequence_id, 0) for sequence_id, values in chances.items() if values]
    heapq.heapify(heap)
    taken: list[int] = []
    kept = 0
    expected = float(progress)
    best = (1.0 + least_gain) * expected / seconds(rows) if heap else 0.0
    while heap and len(taken) < room:
        chance, sequence_id, place = heapq.heappop(heap)
        taken.append(sequence_id)
        expected -= chance
        goodput = expected / seconds(rows + len(taken))
        if goodput > best:
            best, kept = goodput, len(taken)
        values = chances[sequence_id]
        if place + 1 < len(values):
            heapq.heappush(heap, (-values[place + 1], sequence_id, place + 1))
    return dict(Counter(taken[:kept]))


def _sampled(state: ScheduleState, plan: StepPlan) -> Iterator[int]:
    """The sequences of a plan that get a token from it."""
    yield from plan.decodes
    if plan.chunks:
        remaining = {sequence.sequence_id: sequence.remaining for sequence in state.running}
        for chunk in plan.chunks:
            if chunk.tokens == remaining[chunk.sequence_id]:
                yield chunk.sequence_id
    for chunk in plan.admit:
        cached = state.cache.cached_prefix(chunk.sequence_id).tokens
        if chunk.tokens == _length(state, chunk) - cached:
            yield chunk.sequence_id


def _context(state: ScheduleState, plan: StepPlan) -> float:
    """Tokens that a row of the plan attends to, on average."""
    running = {sequence.sequence_id: sequence for sequence in state.running}
    keys = sum(running[sequence_id].length for sequence_id in plan.decodes)
    for chunk in plan.chunks:
        keys += chunk.tokens * (running[chunk.sequence_id].computed + chunk.tokens)
    for chunk in plan.admit:
        cached = state.cache.cached_prefix(chunk.sequence_id).tokens
        keys += chunk.tokens * (cached + chunk.tokens)
    return keys / max(1, plan.rows)


def _length(state: ScheduleState, chunk: Chunk) -> int:
    return next(
        sequence.length for sequence in state.waiting if sequence.sequence_id == chunk.sequence_id
    )
