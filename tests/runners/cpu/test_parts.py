"""Rows that attend to several parts with temperatures and scales of their own, on both runners."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tiny_checkpoints import VOCAB, write_tiny, write_variant

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan, KeyPart
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from serving import torch_runner

BEFORE, ROWS = 300, 70
TEMPERED = (260, 0.7, 0.8)
"""How many of the first keys are a part, its temperature and its scale."""
Tempered = tuple[int, float, float]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module", params=[("f32", 1), ("f16", 2), ("bf16", 2), ("i8", 2)])
def cpu(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[CpuRunner]:
    kv, threads = request.param
    runner = CpuRunner.load(
        checkpoint, slots=500, threads=threads, weights="f32", kv_cache_dtype=kv
    )
    yield runner
    runner.close()


def batch(first: int, rows: int, group: Tempered | None = None) -> ForwardBatch:
    """Rows of one request whose token i is in slot i + 7."""
    numbers = np.arange(first, first + rows, dtype=np.int32)
    keys, temperature, scale = group or (0, 1.0, 1.0)
    slots = np.arange(7, 7 + first + rows, dtype=np.int32)
    part = KeyPart(slots[:keys], temperature=temperature, scale=scale)
    tokens = np.random.default_rng(0).integers(1, VOCAB, 400).astype(np.int32)
    return ForwardBatch(
        token_ids=tokens[numbers],
        positions=numbers,
        write_slots=numbers + 7,
        query_indptr=np.array([0, rows], np.int32),
        kv_indptr=np.array([0, first + rows - keys], np.int32),
        kv_slots=slots[keys:],
        logit_rows=np.arange(rows, dtype=np.int32),
        attention=() if group is None else (AttentionPlan(parts=(part,)),),
    )


def logits(runner: Runner, group: Tempered | None, parts: list[int]) -> np.ndarray:
    """Logits of the rows after the first ones, run in parts of so many."""
    runner.forward(batch(0, BEFORE))
    found, first = [], BEFORE
    for rows in parts:
        found.append(runner.forward(batch(first, rows, group)).copy())
        first += rows
    return np.concatenate(found)


def test_the_cpu_kernels_agree_with_torch(cpu: CpuRunner, checkpoint: Checkpoint) -> None:
    expected = logits(torch_runner(checkpoint, slots=500), TEMPERED, [ROWS])
    found = logits(cpu, TEMPERED, [ROWS])
    tolerance = {"f32": 1e-3, "f16": 0.02, "bf16": 0.16, "i8": 0.6}[cpu.kv_cache_dtype.value]
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0.0)


def test_a_row_has_the_same_bits_however_it_is_run(cpu: CpuRunner) -> None:
    whole = logits(cpu, TEMPERED, [ROWS])
    assert np.array_equal(whole, logits(cpu, TEMPERED, [1, 3, ROWS - 4]))


def test_other_requests_of_the_step_keep_their_bits(cpu: CpuRunner) -> None:
    cpu.forward(batch(0, BEFORE))
    alone = [cpu.forward(batch(BEFORE, rows, group)).copy() for rows, group in ((9, TEMPERED),)]
    plain = replace(batch(20, 5), write_slots=np.arange(450, 455, dtype=np.int32))
    plain = replace(plain, kv_slots=np.append(plain.kv_slots[:20], plain.write_slots))
    expected = cpu.forward(plain).copy()
    own = batch(BEFORE, 9, TEMPERED)
    both = ForwardBatch(
        token_ids=np.append(plain.token_ids, own.token_ids),
        positions=np.append(plain.positions, own.positions),
        write_slots=np.append(plain.write_slots, own.write_slots),
        query_indptr=np.array([0, 5, 14], np.int32),
        kv_indptr=np.array([0, 25, 25 + len(own.kv_slots)], np.int32),
        kv_slots=np.append(plain.kv_slots, own.kv_slots),
        logit_rows=np.arange(14, dtype=np.int32),
        attention=(None, *own.attention),
    )
    found = cpu.forward(both)
    assert np.array_equal(found[:5], expected)
    assert np.array_equal(found[5:], alone[0])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_without_temperature_and_scale_it_is_one_softmax(
    cpu: CpuRunner, checkpoint: Checkpoint, backend: str
) -> None:
    runner: Runner = cpu if backend == "cpu" else torch_runner(checkpoint, slots=500)
    neutral, dense = (logits(runner, group, [ROWS]) for group in ((260, 1.0, 1.0), None))
    # Rounded KV of later layers can turn out differently for a rounding of 1e-6 before.
    kv = "f32" if backend == "torch" else cpu.kv_cache_dtype.value
    tolerance = {"f32": 1e-4, "f16": 0.01, "bf16": 0.1, "i8": 0.3}[kv]
    np.testing.assert_allclose(neutral, dense, atol=tolerance, rtol=0.0)
    near = logits(runner, (260, 1.0001, 1.0), [ROWS])
    np.testing.assert_allclose(near, dense, atol=max(10 * tolerance, 0.02), rtol=0.0)
    assert not np.allclose(logits(runner, TEMPERED, [ROWS]), dense, atol=0.3)


def test_sinks_join_the_softmax_over_all_parts(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("sinks") / "gpt-oss"
    everywhere = ["full_attention"] * 3
    checkpoint = open_checkpoint(write_tiny("gpt-oss", folder, layer_types=everywhere))
    assert checkpoint.config.sinks
    runner = CpuRunner.load(checkpoint, slots=500, threads=2, weights="f32")
    expected = logits(torch_runner(checkpoint, slots=500), TEMPERED, [ROWS])
    np.testing.assert_allclose(logits(runner, TEMPERED, [ROWS]), expected, atol=1e-3, rtol=0.0)
    whole = logits(runner, (260, 1.0, 1.0), [ROWS])
    np.testing.assert_allclose(whole, logits(runner, None, [ROWS]), atol=1e-4, rtol=0.0)
    runner.close()
