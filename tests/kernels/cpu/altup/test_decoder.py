"""Streams of hidden rows on the CPU: the same bits on any threads, also with quantised weights.

That they are the right ones is compared with transformers in tests/runners.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from pass_invariants import (
    check_distance_from_exact,
    check_threads_and_chunks,
    runners_of_8_bits,
)
from tiny_checkpoints import VOCAB, write_variant

from midfill.kernels.cpu.row_blocks import MAX_BLOCK_ROWS
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from serving import torch_runner

SLOTS = 400
TOKENS = np.random.default_rng(0).integers(4, VOCAB, 3 * MAX_BLOCK_ROWS).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_variant("gemma3n", tmp_path_factory.mktemp("gemma3n")))


@pytest.fixture(scope="module")
def runners(checkpoint: Checkpoint) -> Iterator[list[CpuRunner]]:
    with runners_of_8_bits(checkpoint, SLOTS) as runners:
        yield runners


def test_threads_and_chunks_change_no_bit(runners: list[CpuRunner]) -> None:
    check_threads_and_chunks(runners, TOKENS, [], [1, 3, 2 * MAX_BLOCK_ROWS + 1])


def test_quantised_weights_stay_close_to_exact_ones(
    checkpoint: Checkpoint, runners: list[CpuRunner]
) -> None:
    check_distance_from_exact(checkpoint, runners[1], TOKENS)


def test_observed_queries_are_those_of_torch_in_layers_with_and_without_kv(
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
    expected = np.asarray(reference.observed_queries(step))
    for runner in runners:
        runner.forward(step)
        found = runner.observed_queries(step)
        for layer in (0, 3, 4):
            error = np.linalg.norm(found[layer] - expected[layer])
            assert error < 0.1 * np.linalg.norm(expected[layer])


def test_layers_that_share_kv_have_no_memory_for_it(
    checkpoint: Checkpoint, runners: list[CpuRunner]
) -> None:
    config = checkpoint.config
    kept = 3 * SLOTS * config.kv_heads * config.head_dim * 2 * 4  # of five layers
    assert [runner.kv_bytes for runner in runners] == [kept] * 3
    assert torch_runner(checkpoint, slots=SLOTS).kv_bytes == kept


def test_rows_without_logits_stop_before_layers_that_keep_no_kv(
    runners: list[CpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runners[1]
    stepper = Stepper(runner)
    sequences = [Sequence(TOKENS[:50]), Sequence(TOKENS[50:90]), Sequence(TOKENS[90:])]
    whole = stepper.pack([(sequence, sequence.remaining) for sequence in sequences])
    expected = runner.forward(whole).copy()
    ran = []
    run = runner._run

    def noted(batch: ForwardBatch, hidden: np.ndarray | None, stages: Any) -> None:
        ran.append((batch.rows, stages.first_layer, stages.end_layer))
        run(batch, hidden, stages)

    monkeypatch.setattr(runner, "_run", noted)
    wanted = np.array([3, 49, 95], np.int32)  # of the first request and the last
    found = runner.forward(replace(whole, logit_rows=wanted))
    np.testing.assert_array_equal(found, expected[wanted])
    assert len(runner.forward(replace(whole, logit_rows=wanted[:0]))) == 0
    assert ran == [(96, 0, 3), (3, 3, 5), (96, 0, 3)]
