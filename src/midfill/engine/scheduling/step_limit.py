"""StepTimeLimit: how many rows a step may have, so that nobody waits long for its end.

A request that arrives during a step waits for that to end, also where the step computes a prompt
that nobody wants any more. With a large model, a step of the whole token budget takes longer than
a keystroke should.
"""

from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence
from midfill.engine.scheduling.step_cost import StepCost

MIN_ROWS = 16
"""Fewer rows would spend most of a step on reading the weights."""
MIN_STEPS = 8
"""Steps to observe before any is limited: the first ones read and compile what is cached later."""


class StepTimeLimit:
    """Learns how long steps take and says which number of rows keeps them short."""

    def __init__(self, seconds: float, cost: StepCost, max_rows: int) -> None:
        """Create a limit.

        Args:
            seconds: that a step with prompts may take.
            cost: how long steps take; updated after every step.
            max_rows: that steps have anyway.
        """
        self._seconds = seconds
        self._cost = cost
        self._max_rows = max_rows
        self._steps = 0

    def max_rows(self, state: ScheduleState) -> int | None:
        """Return how many rows a step may have; None: as many as the policy likes."""
        context = _prompt_context(state)
        if self._steps < MIN_STEPS or context is None:
            return None
        if self._cost.seconds(self._max_rows, context) <= self._seconds:
            return None
        few, many = 1, self._max_rows
        while many - few > 1:
            rows = (few + many) // 2
            if self._cost.seconds(rows, context) <= self._seconds:
                few = rows
            else:
                many = rows
        return max(few, MIN_ROWS)

    def record_step(self, rows: int, context: float, seconds: float) -> None:
        """Learn from the time that a step took; see ``StepCost.observe``."""
        self._steps += 1
        self._cost.observe(rows, context, seconds)


def _prompt_context(state: ScheduleState) -> float | None:
    """Return how many tokens the next chunk of a prompt follows; None if no prompt is next."""
    prefilling = [sequence.computed for sequence in state.running if not sequence.decoding]
    if prefilling:
        return max(prefilling)
    queue: tuple[WaitingSequence, ...] = state.waiting
    if not queue and not state.running:
        queue = state.background
    return state.cache.cached_prefix(queue[0].sequence_id).tokens if queue else None
