"""StepCosts: how long a step of the engine takes, fitted to steps that were measured.

A step's time is the sum of what its rows cost (weights are read once for all of them, so this is no
line: a time for each of some numbers of rows, interpolated between them), what each row with logits
and each request adds, and attention: the keys that are read, and the pairs of a row and a key.
"""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from midfill.arrays import Float64Array
from midfill.errors import MidfillError
from midfill.runners.forward.batch import ForwardBatch
from midfill.system.machine import Machine

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows with a time of their own."""
_ROUNDS = 8  # of fitting
_SMALL = 0.02  # relative deviation that isn't told from a smaller one


class StepWork(NamedTuple):
    """What a forward pass has to do.

    Attributes:
        rows: tokens that go through the model.
        outputs: rows whose logits are computed.
        requests: that the rows belong to.
        keys_read: keys that requests' rows attend to, counted once per request.
        key_pairs: pairs of a row and a key that it attends to.
    """

    rows: int
    outputs: int
    requests: int
    keys_read: int
    key_pairs: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> "StepWork":
        """Return the work of a batch."""
        seen = batch.slots_seen()
        return cls(
            rows=batch.rows,
            outputs=len(batch.logit_rows),
            requests=batch.requests,
            keys_read=int(seen[batch.query_indptr[1:] - 1].sum()),
            key_pairs=int(seen.sum()),
        )


class StepSample(NamedTuple):
    """A measured step."""

    work: StepWork
    seconds: float


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What steps cost, in seconds.

    Attributes:
        model: that was measured.
        machine: where.
        engine: what computed, in words.
        slots: of its KV pool.
        slot_bytes: of one token's KV.
        rows: of steps with so many rows, ``KNOTS``.
        output, request: of each row with logits, of each request.
        key_read, key_pair: of attention.
        error: median of the relative deviation of measured steps from costs that were fitted to
            the other half of them.
        request_seconds: that each request takes outside of steps: HTTP, tokenising, messages.
        drift: how many times as long steps took in the later of two measurements, ``averaged``.
    """

    model: str
    machine: Machine
    engine: str
    slots: int
    slot_bytes: int
    rows: tuple[float, ...]
    output: float
    request: float
    key_read: float
    key_pair: float
    error: float = 0.0
    request_seconds: float = 0.0
    drift: float = 1.0

    def seconds(self, work: StepWork) -> float:
        """Return how long a step takes."""
        return self.layers_seconds(work) + self.output * work.outputs

    def layers_seconds(self, work: StepWork) -> float:
        """Return how long its layers take, without logits."""
        return (
            float(_hats(work.rows) @ np.array(self.rows))
            + self.request * work.requests
            + self.key_read * work.keys_read
            + self.key_pair * work.key_pairs
        )


def averaged(first: StepCosts, second: StepCosts) -> StepCosts:
    """Return the means of two measurements: a shared machine's speed drifts between them."""

    def middle(name: str) -> float:
        return float(getattr(first, name) + getattr(second, name)) / 2

    names = ("output", "request", "key_read", "key_pair", "error", "request_seconds")
    work = StepWork(rows=1, outputs=1, requests=1, keys_read=256, key_pairs=256)
    return msgspec.structs.replace(
        first,
        rows=tuple((one + other) / 2 for one, other in zip(first.rows, second.rows, strict=True)),
        drift=second.seconds(work) / first.seconds(work),
        **{name: middle(name) for name in names},
    )


def _hats(rows: int) -> Float64Array:
    """Return the weight of each knot for a number of rows; beyond the last one, in proportion."""
    weights = np.zeros(len(KNOTS))
    above = bisect_right(KNOTS, rows)
    if above == len(KNOTS):
        weights[-1] = rows / KNOTS[-1]
        return weights
    lower, upper = KNOTS[above - 1], KNOTS[above]
    share = (rows - lower) / (upper - lower)
    weights[above - 1 : above + 1] = 1.0 - share, share
    return weights


class FittedCosts(NamedTuple):
    """The fields of ``StepCosts`` that are fitted."""

    rows: tuple[float, ...]
    output: float
    request: float
    key_read: float
    key_pair: float
    error: float


def fit_costs(samples: Sequence[StepSample]) -> FittedCosts:
    """Fit costs to measured steps: none is negative, and more rows take no less.

    The sum of the relative deviations is minimised, not that of their squares (by least squares
    that are weighted anew each time): a step that other work on the machine has interrupted says
    little.

    Raises:
        MidfillError: there are too few steps.
    """
    if len(samples) <= 2 * len(KNOTS):
        raise MidfillError(f"{len(samples)} steps are too few to tell what steps cost")
    matrix = np.array([[*_climbs(work.rows), *work[1:]] for work, _ in samples])
    seconds = np.array([sample.seconds for sample in samples])
    costs = _fit(matrix, seconds)
    output, request, key_read, key_pair = map(float, costs[len(KNOTS) :])
    return FittedCosts(
        rows=_filled(costs[: len(KNOTS)], matrix),
        output=output,
        request=request,
        key_read=key_read,
        key_pair=key_pair,
        error=_held_out_error(matrix, seconds),
    )


def _fit(matrix: Float64Array, seconds: Float64Array) -> Float64Array:
    """Return the cost of each column of ``matrix``; see ``fit_costs``."""
    expected, weights = seconds, np.ones(len(seconds))
    for _ in range(_ROUNDS):
        factors = np.sqrt(weights) / expected
        costs = nonnegative_least_squares(matrix * factors[:, None], seconds * factors)
        expected = np.maximum(matrix @ costs, 0.1 * seconds)
        deviations = np.abs(seconds / expected - 1.0)
        weights = 1.0 / np.maximum(deviations, _SMALL)
    return costs


def _held_out_error(matrix: Float64Array, seconds: Float64Array) -> float:
    """Return the median of the relative deviation of each half from a fit to the other one."""
    expected = np.empty(len(seconds))
    for half in (slice(0, None, 2), slice(1, None, 2)):
        others = np.ones(len(seconds), bool)
        others[half] = False
        expected[half] = matrix[half] @ _fit(matrix[others], seconds[others])
    return float(np.median(np.abs(expected / seconds - 1.0)))


def _climbs(rows: int) -> Float64Array:
    """Return for each knot how much of the climb from the one before counts for some rows."""
    return np.cumsum(_hats(rows)[::-1])[::-1]


def _filled(climbs: Float64Array, matrix: Float64Array) -> tuple[float, ...]:
    """Return the knots' times; where no step was so large, in proportion to the knot before."""
    found = [float(climbs[0])]
    for place in range(1, len(KNOTS)):
        seen = matrix[:, place].any()
        last = found[-1]
        grown = last + float(climbs[place]) if seen else last * KNOTS[place] / KNOTS[place - 1]
        found.append(grown)
    return tuple(found)


def nonnegative_least_squares(matrix: Float64Array, target: Float64Array) -> Float64Array:
    """Return x >= 0 that minimises ``|matrix @ x - target|``.

    Source: Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.

    Args:
        matrix: [equations, unknowns] float64.
        target: [equations] float64.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale
    unknowns = scaled.shape[1]
    solution, active = np.zeros(unknowns), np.zeros(unknowns, bool)
    for _ in range(3 * unknowns):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        active[best] = True
        solution, active = _feasible(scaled, target, solution, active)
    result: Float64Array = solution / scale
    return result


def _feasible(
    matrix: Float64Array, target: Float64Array, solution: Float64Array, active: np.ndarray
) -> tuple[Float64Array, np.ndarray]:
    """Solve for the active unknowns, and drop those that would become negative."""
    while True:
        trial = np.zeros(len(solution))
        trial[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        negative = active & (trial <= 0.0)
        if not negative.any():
            return trial, active
        steps = solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300)
        solution = solution + steps.min() * (trial - solution)
        active = active & (solution > 1e-15)
        solution = np.where(active, solution, 0.0)
        if not active.any():
            return solution, active


def read_costs(path: Path) -> StepCosts:
    """Read the costs that were written with ``--step-costs``.

    Raises:
        MidfillError: there are none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCosts)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MidfillError(f"{path} holds no step costs: {error}") from None
