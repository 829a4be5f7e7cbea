"""The pass with norms over all heads: the same bits on any threads, also with quantised weights.

Passes are compared with transformers in tests/runners.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from pass_invariants import (
    check_distance_from_exact,
    check_threads_and_chunks,
    runners_of_8_bits,
)
from sparse_planners import MadePlanner, everything, with_planners
from tiny_checkpoints import VOCAB, write_variant

from midfill.kernels.cpu.row_blocks import MAX_BLOCK_ROWS
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from serving import torch_runner

SLOTS = 400
TOKENS = np.random.default_rng(0).integers(4, VOCAB, 3 * MAX_BLOCK_ROWS).tolist()


@pytest.fixture(scope="module", params=["olmo2", "olmoe"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return open_checkpoint(write_variant(request.param, tmp_path_factory.mktemp("olmo")))


@pytest.fixture(scope="module")
def runners(checkpoint: Checkpoint) -> Iterator[list[CpuRunner]]:
    with runners_of_8_bits(checkpoint, SLOTS) as runners:
        yield runners


def test_threads_and_chunks_change_no_bit(runners: list[CpuRunner]) -> None:
    check_threads_and_chunks(runners, TOKENS, [], [1, 3, 2 * MAX_BLOCK_ROWS + 1])


def test_quantised_weights_stay_close_to_exact_ones(
    checkpoint: Checkpoint, runners: list[CpuRunner]
) -> None:
    # A few rows are sent to another expert.
    check_distance_from_exact(checkpoint, runners[1], TOKENS)


def test_observed_queries_are_those_of_torch(
    checkpoint: Checkpoint, runners: list[CpuRunner]
) -> None:
    count = len(TOKENS)
    rows = np.arange(count, dtype=np.int32)
    ends = np.array([0, count], np.int32)
    step = ForwardBatch(
        np.array(TOKENS, np.int32), rows, rows, ends, ends, rows, rows[-1:],
        observed_rows=rows[[0, 40, -1]],
    )  # fmt: skip
    reference = torch_runner(checkpoint, slots=SLOTS)
    reference.forward(step)
    expected = np.asarray(reference.observed_queries(step, 0, 1))
    for runner in runners:
        runner.forward(step)
        found = runner.observed_queries(step, 0, 1)
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_a_pass_that_stops_before_each_attention_has_the_same_bits(
    runners: list[CpuRunner],
) -> None:
    found = []
    for planner in (None, MadePlanner(everything)):
        stepper, sequence = Stepper(runners[1]), Sequence(list(TOKENS))
        stepper.step([(sequence, MAX_BLOCK_ROWS)])
        batch = stepper.pack([(sequence, sequence.remaining)])
        batch = batch if planner is None else with_planners(batch, planner)
        found.append(runners[1].forward(batch).copy())
    np.testing.assert_array_equal(found[0], found[1])
