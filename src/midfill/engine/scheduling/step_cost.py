"""StepCost: how long a step takes, by its rows and the keys they read.

The policy of drafts compares this cost with what a draft may gain. ``StepTimeLimit`` limits the
rows of a step: a request that arrives during a step waits until it ends, even if the step computes
a prompt that is no longer wanted. With a large model, a step that uses the whole token budget would
delay the answer to a keystroke too long. But each step reads the weights anew, of a mixture of
experts nearly all of them, and a long prompt can take far longer in short steps. Where that is so,
steps may take longer, the longer nobody has asked for anything else.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128)

# Before anything is measured: on a CPU, each further row costs about a fifth of the first.
_FURTHER_ROW_COST = 0.2

# Fewer keys per row than this are treated alike: attention is a small part of such steps.
_FEW_KEYS = 256

# Share of its deviation by which an observation moves the estimate.
_RATE = 0.2

# Maximum factor by which an observation counts as off: a step that was interrupted by other work
# on the machine says nothing about rows.
_MAX_DEVIATION = 2.0
MIN_ROWS = 16
"""Fewer rows would spend most of a step on reading the weights."""

MIN_STEPS = 8
"""Steps to observe before any is limited: the first ones read and compile what is cached later."""

_QUIET_SHARE = 0.25
"""Of the time since the last request arrived: so long may a step take where no answer is decoded.
Who asks next waits at most that much longer than they have paused."""
_PAYS = 1.1
"""Maximum cost of a row, as a multiple of its cost in a longer step, for which none is taken."""

_Times = dict[int, float]  # seconds by number of rows, for some of _KNOTS


class StepCost:
    """Estimates the time of steps, and learns from the engine's own.

    Steps are grouped by their keys per row, up to a factor of two. Each group keeps times for some
    numbers of rows. Times between two known ones are interpolated, times beyond them are
    extrapolated from the nearest. A group without observations uses the nearest group's times.
    """

    def __init__(self) -> None:
        self._by_keys: dict[int, _Times] = {}

    def seconds(self, rows: int, keys: float) -> float:
        """Return the estimated time of a step.

        Args:
            rows: tokens that go through the model; at least 1.
            keys: tokens that a row attends to, on average.
        """
        return _estimate(self._nearest(_keys_group(keys)), rows)

    def observe(self, rows: int, keys: float, seconds: float) -> None:
        """Record the time of a step; ``rows`` and ``keys`` as in ``seconds``."""
        group = _keys_group(keys)
        times = self._nearest(group)
        ratio = seconds / _estimate(times, rows)
        if group not in self._by_keys:
            # The first observation of a group sets its scale.
            times = {knot: time * ratio for knot, time in times.items()}
            self._by_keys[group] = times
            off = 0.0 if times else ratio - 1.0
        else:
            off = min(max(ratio, 1.0 / _MAX_DEVIATION), _MAX_DEVIATION) - 1.0
        lower, share = _locate(rows)
        for knot, weight in ((lower, 1.0 - min(share, 1.0)), (_next(lower), min(share, 1.0))):
            if knot in times:
                times[knot] *= 1.0 + _RATE * weight * off
            elif weight >= 0.5:
                times[knot] = _at(times, knot) * (1.0 + off)

    def _nearest(self, group: int) -> _Times:
        """Return the times of the nearest group with observations; empty if there is none."""
        known = min(self._by_keys, key=lambda other: (abs(other - group), other), default=None)
        return {} if known is None else self._by_keys[known]


def _keys_group(keys: float) -> int:
    """Return the group of steps whose keys per row differ by less than a factor of two."""
    return max(0, (int(keys) // _FEW_KEYS).bit_length())


def _locate(rows: int) -> tuple[int, float]:
    """Return the knot below and the share of the way to the next, above 1 beyond the last."""
    lower = _KNOTS[min(bisect_right(_KNOTS, rows), len(_KNOTS) - 1) - 1]
    return lower, (rows - lower) / (_next(lower) - lower)


def _next(knot: int) -> int:
    return _KNOTS[_KNOTS.index(knot) + 1]


def _estimate(times: _Times, rows: int) -> float:
    lower, share = _locate(rows)
    at_lower = _at(times, lower)
    return at_lower + share * (_at(times, _next(lower)) - at_lower)


def _at(times: _Times, knot: int) -> float:
    """Return the time at a knot: observed, interpolated, or in proportion to the nearest one."""
    if knot in times:
        return times[knot]
    seen = sorted(times)
    above = bisect_left(seen, knot)
    if 0 < above < len(seen):
        lower, upper = seen[above - 1], seen[above]
        share = (knot - lower) / (upper - lower)
        return times[lower] + share * (times[upper] - times[lower])
    if not seen:
        return _guess(knot)
    nearest = seen[min(above, len(seen) - 1)]
    return times[nearest] * _guess(knot) / _guess(nearest)


def _guess(rows: int) -> float:
    return 1.0 + _FURTHER_ROW_COST * (rows - 1)


class StepTimeLimit:
    """Learns how long steps take and says which number of rows keeps them short."""

    def __init__(self, seconds: float, cost: StepCost, max_rows: int) -> None:
        """Create a limit.

        Args:
            seconds: that a step with prompts may take where somebody has asked just now.
            cost: how long steps take; updated after every step.
            max_rows: that steps have anyway.
        """
        self._seconds = seconds
        self._cost = cost
        self._max_rows = max_rows
        self._steps = 0

    def inform(self, state: ScheduleState) -> ScheduleState:
        """Return a state in which a policy finds what steps cost, and how many rows they may have.

        The first steps are not judged, nor are those without prompts.
        """
        if self._steps < MIN_STEPS:
            return state
        state = replace(state, step_seconds=self._cost.seconds)
        estimate = estimate_steps(state)
        if estimate is None or estimate.seconds(self._max_rows) <= self._seconds:
            return state
        fewest = max_rows_within(self._seconds, estimate, self._max_rows)
        most = max_rows_within(self._quiet_seconds(state), estimate, self._max_rows)
        return replace(state, max_rows=_rows_that_pay(estimate, fewest, most))

    def _quiet_seconds(self, state: ScheduleState) -> float:
        """Return how long the next step may take where it pays."""
        arrivals = [sequence.arrived for sequence in state.running]
        arrivals += [sequence.arrived for sequence in state.waiting]
        if not arrivals or any(sequence.decoding for sequence in state.running):
            return self._seconds
        return max(self._seconds, _QUIET_SHARE * (state.now - max(arrivals)))

    def record_step(self, rows: int, keys: float, seconds: float) -> None:
        """Learn from the time that a step took; see ``StepCost.observe``."""
        self._steps += 1
        self._cost.observe(rows, keys, seconds)


@dataclass(frozen=True)
class StepEstimate:
    """How long the next step would take with so many rows.

    Attributes:
        step_seconds: see ``ScheduleState``.
        decodes: how many of the rows are decodes.
        decode_keys: tokens that these attend to, all together.
        prompt_keys: tokens that the next chunk of a prompt follows.
    """

    step_seconds: Callable[[int, float], float]
    decodes: int
    decode_keys: int
    prompt_keys: int

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step with all decodes and, if ``rows`` are more, a chunk."""
        rows = max(rows, self.decodes, 1)
        keys = self.decode_keys + (rows - self.decodes) * self.prompt_keys
        return self.step_seconds(rows, keys / rows)


def estimate_steps(state: ScheduleState) -> StepEstimate | None:
    """Return what the next step would cost; None if no prompt is next, or nothing is known."""
    prompt_keys = _next_prompt_keys(state)
    if state.step_seconds is None or prompt_keys is None:
        return None
    lengths = [sequence.length for sequence in state.running if sequence.decoding]
    return StepEstimate(state.step_seconds, len(lengths), sum(lengths), prompt_keys)


def max_rows_within(
    seconds: float, estimate: StepEstimate, largest: int, smallest: int = MIN_ROWS
) -> int:
    """Return the largest number of rows whose step takes no longer.

    This is how Sarathi-Serve's token budget follows from a limit for the gap between two tokens
    (Agrawal et al., OSDI 2024, arXiv 2403.02310, section 4.3), from costs that are measured as the
    engine runs, and for the contexts that it has at the time.

    Args:
        seconds: that the step may take.
        estimate: of the step.
        largest: number of rows to consider.
        smallest: number of rows where none is short enough.
    """
    few, many = 0, largest + 1
    while many - few > 1:
        rows = (few + many) // 2
        if estimate.seconds(rows) <= seconds:
            few = rows
        else:
            many = rows
    return max(few, smallest)


def _rows_that_pay(estimate: StepEstimate, fewest: int, most: int) -> int:
    """Return the fewest rows that cost hardly more each than those of the longest step."""
    enough = _PAYS * estimate.seconds(most) / most
    rows = range(fewest, most)
    return fewest + bisect_left(rows, True, key=lambda n: estimate.seconds(n) / n <= enough)


def _next_prompt_keys(state: ScheduleState) -> int | None:
    """Return how many tokens the next chunk of a prompt follows; None if no prompt is next."""
    prefilling = [sequence.computed for sequence in state.running if not sequence.decoding]
    if prefilling:
        return max(prefilling)
    queue: tuple[WaitingSequence, ...] = state.waiting
    if not queue and not state.running:
        queue = state.background
    return state.cache.cached_prefix(queue[0].sequence_id).tokens if queue else None
