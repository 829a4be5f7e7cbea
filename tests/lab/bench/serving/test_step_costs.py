"""Step costs: what was put into made-up steps is found again, and kept in a file."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from made_step_costs import STEP_COSTS

from midfill.errors import MidfillError
from midfill.runners.forward.batch import ForwardBatch
from midfill_lab.bench.serving.step_costs import (
    StepSample,
    StepWork,
    averaged,
    fit_costs,
    nonnegative_least_squares,
    read_costs,
)


def samples(noise: Callable[[], float] = lambda: 1.0) -> list[StepSample]:
    rng = random.Random(5)
    found = []
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 128, 200, 256):
        for _ in range(12):
            requests, context = rng.randint(1, rows), rng.choice((20, 400, 1500))
            outputs = rng.randint(0, requests)
            work = StepWork(rows, outputs, requests, requests * context, rows * context)
            found.append(StepSample(work, STEP_COSTS.seconds(work) * noise()))
    return found


def test_costs_are_found_again() -> None:
    fitted = fit_costs(samples())
    assert fitted.rows == pytest.approx(STEP_COSTS.rows)
    assert fitted.output == pytest.approx(STEP_COSTS.output)
    assert fitted.key_read == pytest.approx(STEP_COSTS.key_read)
    assert fitted.key_pair == pytest.approx(STEP_COSTS.key_pair)
    assert fitted.error < 1e-6


def test_interrupted_steps_say_little() -> None:
    rng = random.Random(2)
    fitted = fit_costs(samples(lambda: 5.0 if rng.random() < 0.2 else 1.0))
    assert fitted.rows == pytest.approx(STEP_COSTS.rows, rel=0.2)


def test_the_error_is_that_on_steps_that_nothing_was_fitted_to() -> None:
    rng = random.Random(4)
    fitted = fit_costs(samples(lambda: rng.gauss(1.0, 0.1)))
    assert fitted.error == pytest.approx(0.0674, rel=0.3)  # of a normal distribution
    few = samples(lambda: rng.gauss(1.0, 0.1))[::6]
    assert fit_costs(few).error > fitted.error


def test_more_rows_never_take_less() -> None:
    rng = random.Random(3)
    fitted = fit_costs(samples(lambda: rng.lognormvariate(0, 0.5)))
    assert list(fitted.rows) == sorted(fitted.rows)


def test_sizes_that_no_step_had_cost_in_proportion() -> None:
    fitted = fit_costs([sample for sample in samples() if sample.work.rows <= 100])
    assert fitted.rows[-1] == pytest.approx(2 * fitted.rows[-2])


def test_between_knots_costs_are_interpolated_and_beyond_them_in_proportion() -> None:
    def seconds(rows: int) -> float:
        return STEP_COSTS.layers_seconds(StepWork(rows, 0, 0, 0, 0))

    assert seconds(8) == pytest.approx(0.006)
    assert seconds(12) == pytest.approx(0.007)
    assert seconds(512) == pytest.approx(0.14)


def test_too_few_steps() -> None:
    with pytest.raises(MidfillError, match="2 steps are too few"):
        fit_costs(samples()[:2])


def test_the_work_of_a_batch() -> None:
    # A decode after 5 tokens, and a chunk of 3 after 2.
    batch = ForwardBatch(
        token_ids=np.zeros(4, np.int32),
        positions=np.array([5, 2, 3, 4], np.int32),
        write_slots=np.arange(4, dtype=np.int32),
        query_indptr=np.array([0, 1, 4], np.int32),
        kv_indptr=np.array([0, 6, 11], np.int32),
        kv_slots=np.arange(11, dtype=np.int32),
        logit_rows=np.array([0], np.int32),
    )
    assert StepWork.of(batch) == StepWork(4, 1, 2, 6 + 5, 6 + 3 + 4 + 5)


def test_two_measurements_are_averaged() -> None:
    slower = msgspec.structs.replace(
        STEP_COSTS,
        rows=tuple(3 * each for each in STEP_COSTS.rows),
        output=3 * STEP_COSTS.output,
        error=0.2,
    )
    both = averaged(STEP_COSTS, slower)
    assert both.rows == pytest.approx([2 * each for each in STEP_COSTS.rows])
    assert (both.output, both.error) == (pytest.approx(2 * STEP_COSTS.output), pytest.approx(0.1))
    assert 2.5 < both.drift < 3.0


def test_no_solution_is_negative() -> None:
    rng = np.random.default_rng(4)
    matrix, target = rng.standard_normal((30, 6)), rng.standard_normal(30)
    found = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ found)
    # The conditions of Karush, Kuhn and Tucker.
    assert (found >= 0).all()
    assert (gradient <= 1e-8).all()
    assert abs(gradient[found > 0]).max(initial=0) < 1e-8


def test_costs_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(STEP_COSTS))
    assert read_costs(path) == STEP_COSTS
    path.write_text("{}")
    with pytest.raises(MidfillError, match="holds no step costs"):
        read_costs(path)
    with pytest.raises(MidfillError, match="can't be read"):
        read_costs(tmp_path / "none")
