"""StepMemory: usual steps write to memory that was allocated before the first of them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from tiny_checkpoints import VOCAB

from midfill.kernels.cpu.attention_metadata import TILE_FIELDS, plan_attention
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.cpu.step_memory import GrowingArrays, usual_size

ROWS, SLOTS = 24, 600


@pytest.fixture
def runner(tiny_folder: Path) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(open_checkpoint(tiny_folder), slots=SLOTS, threads=2, max_rows=ROWS)
    yield runner
    runner.close()


def sequence(length: int, seed: int) -> Sequence:
    return Sequence(np.random.default_rng(seed).integers(4, VOCAB, length).tolist())


def test_usual_steps_need_no_further_memory(runner: CpuRunner) -> None:
    memory, stepper = runner._memory, Stepper(runner)
    workspace, size = memory.workspace, memory.nbytes
    answers = [sequence(1, seed) for seed in range(ROWS)]
    first = [stepper.prefill(one)[-1] for one in answers]
    stepper.decode(answers, first, count=2)  # the logits of as many rows as there may be
    long = sequence(400, 99)
    logits = stepper.prefill(long, chunk_sizes=[ROWS] * (len(long.tokens) // ROWS))
    stepper.decode([long], [logits[-1]], count=2)  # its keys are divided among the threads
    assert memory.workspace is workspace
    assert memory.nbytes == size


def test_a_larger_step_gets_more(runner: CpuRunner) -> None:
    memory, stepper = runner._memory, Stepper(runner)
    workspace, size = memory.workspace, memory.nbytes
    logits = stepper.prefill(sequence(ROWS + 1, 1))
    assert len(logits) == ROWS + 1
    assert memory.workspace is not workspace
    assert memory.nbytes > size


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 48])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_there_is_room_for_all_partials_of_requests_that_share_nothing(
    threads: int, kv_heads: int
) -> None:
    context, slots, rows = 2000, 5000, 64
    shape = SimpleNamespace(kv_heads=kv_heads, context=context, vocab=VOCAB)
    usual = usual_size(cast(ModelConfig, shape), rows, slots, threads)
    most = 0
    for requests in range(1, rows + 1):
        keys = min(context, slots // requests)
        ends = np.arange(requests + 1, dtype=np.int32)
        tiles = np.zeros((rows, TILE_FIELDS), np.int32)
        nothing = np.zeros(0, np.int32)
        _, partials = plan_attention(
            ends, keys * ends, nothing, nothing, 3, kv_heads, threads, tiles
        )
        most = max(most, partials)
    assert most <= usual.partials


def test_logits_are_allocated_for_as_many_rows_as_fit_a_bound() -> None:
    shape = SimpleNamespace(kv_heads=2, context=2000, vocab=150_000)
    assert usual_size(cast(ModelConfig, shape), 128, 5000, 2).outputs == 128
    assert 128 < usual_size(cast(ModelConfig, shape), 100_000, 5000, 2).outputs < 1000


def test_an_array_stays_while_it_is_large_enough() -> None:
    arrays = GrowingArrays()
    first = arrays.floats("logits", 100)
    assert first.dtype == np.float32
    assert first.size == 100
    assert arrays.floats("logits", 60) is first
    assert arrays.floats("other", 60) is not first
    assert arrays.bytes("blocks", 7).dtype == np.uint8


def test_one_that_grows_little_by_little_is_replaced_seldom() -> None:
    arrays = GrowingArrays()
    seen = {id(array): array for array in (arrays.floats("rows", n) for n in range(1, 1000))}
    assert len(seen) < 40
    assert max(array.size for array in seen.values()) < 1.25 * 1000


def test_one_that_grows_much_has_the_size_that_is_needed() -> None:
    arrays = GrowingArrays()
    arrays.floats("rows", 10)
    assert arrays.floats("rows", 1000).size == 1000


def test_arrays_begin_on_a_cache_line() -> None:
    arrays = GrowingArrays()
    assert all(arrays.floats("rows", n).ctypes.data % 64 == 0 for n in (3, 50, 1000))
