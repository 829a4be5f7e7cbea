"""KV cells of both runners: read, written, moved; and steps that read some cells only."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from naive_attention import uniform_ragged_index
from tiny_checkpoints import VOCAB, write_variant

from midfill.config import KVCacheDtypeName
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from serving import torch_runner

SLOTS, LENGTH = 80, 24


@pytest.fixture(scope="module")
def cpu(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=SLOTS, threads=2, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


@pytest.fixture(scope="module", params=["cpu", "torch"])
def runner(request: pytest.FixtureRequest, llama: Checkpoint, cpu: CpuRunner) -> Runner:
    return cpu if request.param == "cpu" else torch_runner(llama, slots=SLOTS)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def latent_runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    """Of a model whose keys are its values."""
    checkpoint = open_checkpoint(write_variant("deepseek2", tmp_path_factory.mktemp("latent")))
    if request.param == "torch":
        yield torch_runner(checkpoint, slots=SLOTS)
        return
    runner = CpuRunner.load(checkpoint, slots=SLOTS, threads=2, kv_cache_dtype="f32")
    yield runner
    runner.close()


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def scattered(count: int) -> np.ndarray:
    return np.random.default_rng(5).permutation(SLOTS)[:count].astype(np.int32)


def step(
    tokens: np.ndarray,
    position: int,
    slots: np.ndarray,
    *,
    ragged: RaggedIndex | None = None,
    observed: tuple[int, ...] = (),
) -> ForwardBatch:
    """One request whose rows are the last of ``slots``."""
    rows = len(tokens)
    return ForwardBatch(
        token_ids=tokens,
        positions=np.arange(position, position + rows, dtype=np.int32),
        write_slots=slots[-rows:],
        query_indptr=np.array([0, rows], np.int32),
        kv_indptr=np.array([0, len(slots)], np.int32),
        kv_slots=slots,
        logit_rows=np.arange(rows, dtype=np.int32),
        attention=() if ragged is None else (AttentionPlan(ragged),),
        observed_rows=np.array(observed, np.int32),
    )


def heads_of(runner: Runner) -> int:
    return runner.config.layers * runner.config.kv_heads


def all_cells(runner: Runner, slots: np.ndarray) -> np.ndarray:
    """[heads, n]"""
    return cells_of_slots(slots, heads_of(runner), SLOTS)


def test_what_is_written_is_read_and_no_other_cell_changes(runner: Runner) -> None:
    slots = scattered(LENGTH)
    runner.forward(step(ids(LENGTH), 0, slots))
    cells = all_cells(runner, slots).reshape(-1)
    before = runner.cells.read(cells)
    rng = np.random.default_rng(1)
    chosen = rng.permutation(len(cells))[:17]
    keys, values = rng.normal(size=(2, 17, runner.config.head_dim)).astype(np.float32)
    runner.cells.write(cells[chosen], keys, values)
    for old, new, after in zip(before, (keys, values), runner.cells.read(cells), strict=True):
        old[chosen] = new
        np.testing.assert_array_equal(after, old)


def test_cells_are_what_the_forward_pass_reads(runner: Runner) -> None:
    """A prompt whose cells are moved to other slots has the same next logits."""
    slots = scattered(LENGTH + 2)
    prompt, new = slots[:LENGTH], slots[LENGTH:]
    tokens = ids(LENGTH + 1)
    runner.forward(step(tokens[:LENGTH], 0, prompt))
    before = runner.forward(step(tokens[LENGTH:], LENGTH, slots[: LENGTH + 1])).copy()
    moved = np.roll(prompt, 5)
    source, target = (all_cells(runner, each).reshape(-1) for each in (prompt, moved))
    runner.cells.put(target, runner.cells.take(source))
    after = runner.forward(step(tokens[LENGTH:], LENGTH, np.append(moved, new[1:])))
    assert np.array_equal(before, after)


@pytest.mark.parametrize("shift", [7, -3])
def test_a_shifted_key_is_the_key_of_the_other_position(runner: Runner, shift: int) -> None:
    """The first layer's keys depend on token and position alone."""
    token, slots = ids(1), scattered(2)
    runner.forward(step(token, 10, slots[:1]))
    runner.forward(step(token, 10 + shift, slots[1:]))
    heads = runner.config.kv_heads
    source, expected = (all_cells(runner, slots)[:heads, i] for i in (0, 1))
    runner.cells.put(source, runner.cells.take(source, np.full(heads, shift, np.int32)))
    for found, other in zip(runner.cells.read(source), runner.cells.read(expected), strict=True):
        np.testing.assert_allclose(found, other, atol=2e-6)


def test_keys_that_are_values_move_and_turn_as_others_do(latent_runner: Runner) -> None:
    test_cells_are_what_the_forward_pass_reads(latent_runner)
    for shift in (7, -3):
        test_a_shifted_key_is_the_key_of_the_other_position(latent_runner, shift)
    cells = all_cells(latent_runner, scattered(3)).reshape(-1)
    keys = np.random.default_rng(1).normal(size=(len(cells), latent_runner.config.head_dim))
    latent_runner.cells.write(cells, keys.astype(np.float32), np.zeros_like(keys, np.float32))
    for found in latent_runner.cells.read(cells):
        np.testing.assert_array_equal(found, keys.astype(np.float32))
    dumped = latent_runner.cells.dump(cells)
    assert tuple(each.shape[1] for each in dumped) == latent_runner.cells.layout.widths
    latent_runner.cells.restore(np.roll(cells, 1), dumped)
    found, _ = latent_runner.cells.read(np.roll(cells, 1))
    np.testing.assert_array_equal(found, keys.astype(np.float32))


@pytest.mark.parametrize("kv_cache_dtype", ["f16", "bf16", "i8", "i4"])
def test_rounding_is_that_of_the_forward_pass(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName
) -> None:
    runner = CpuRunner.load(
        llama, slots=SLOTS, threads=1, weights="f32", kv_cache_dtype=kv_cache_dtype
    )
    exact = CpuRunner.load(llama, slots=SLOTS, threads=1, weights="f32", kv_cache_dtype="f32")
    slots = scattered(1)
    for one in (runner, exact):
        one.forward(step(ids(1), 3, slots))
    cells = all_cells(runner, slots)[: runner.config.kv_heads, 0]
    written = runner.cells.read(cells)
    runner.cells.write(cells, *exact.cells.read(cells))
    for found, expected in zip(runner.cells.read(cells), written, strict=True):
        np.testing.assert_array_equal(found, expected)
    for one in (runner, exact):
        one.close()


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "bf16", "i8", "i4"])
def test_what_free_cells_hold_is_never_computed_with(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName
) -> None:
    """They may have held quantised blocks, whose bytes can mean NaN: 0 times it isn't 0."""
    lengths, slots = (1, 3, 37, 130, 300), 620
    results = []
    for filled in (0, 255):
        with closing(
            CpuRunner.load(llama, slots=slots, threads=1, kv_cache_dtype=kv_cache_dtype)
        ) as runner:
            cells = cells_of_slots(np.arange(slots, dtype=np.int32), heads_of(runner), slots)
            widths, cells = runner.cells.layout.widths, cells.reshape(-1)
            stored = (np.full((len(cells), width), filled, np.uint8) for width in widths)
            runner.cells.restore(cells, tuple(stored))
            order = np.random.default_rng(3).permutation(slots).astype(np.int32)
            for length in lengths:
                own, order = order[: length + 7], order[length + 7 :]
                tokens = ids(length + 7, length)
                index = uniform_ragged_index(own[:length], heads_of(runner), slots)
                results += [
                    runner.forward(each).copy()
                    for each in (
                        step(tokens[:length], 0, own[:length]),
                        step(tokens[length : length + 1], length, own[: length + 1]),
                        step(tokens[length + 1 :], length + 1, own),
                        step(tokens[length:], length, own[length:], ragged=index),
                    )
                ]
    count = len(results) // 2
    for zeros, poisoned in zip(results[:count], results[count:], strict=True):
        assert np.array_equal(zeros, poisoned)


def test_all_cells_give_the_bits_of_the_slots(cpu: CpuRunner) -> None:
    slots, tokens = scattered(LENGTH), ids(LENGTH)
    dense = cpu.forward(step(tokens, 0, slots)).copy()
    for kept in (1, 16, LENGTH - 2):
        index = uniform_ragged_index(slots[:kept], heads_of(cpu), SLOTS)
        rest = cpu.forward(step(tokens[kept:], kept, slots[kept:], ragged=index))
        assert np.array_equal(rest, dense[kept:])


def test_both_runners_read_the_same_cells(llama: Checkpoint, cpu: CpuRunner) -> None:
    reference = torch_runner(llama, slots=SLOTS)
    rng = np.random.default_rng(2)
    slots, tokens = scattered(LENGTH + 4), ids(LENGTH + 4)
    prompt = step(tokens[:LENGTH], 0, slots[:LENGTH])
    cells = all_cells(cpu, slots[:LENGTH])
    kept = [row[np.sort(rng.permutation(LENGTH)[: rng.integers(1, LENGTH)])] for row in cells]
    index = RaggedIndex(np.concatenate(kept), np.cumsum([0, *map(len, kept)]).astype(np.int32))
    later = step(tokens[LENGTH:], LENGTH, slots[LENGTH:], ragged=index)
    logits = []
    for one in (cpu, reference):
        one.forward(prompt)
        logits.append(one.forward(later).copy())
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-4)
    dense = reference.forward(step(tokens[LENGTH:], LENGTH, slots))
    assert np.abs(dense - logits[1]).max() > 1e-2


def test_queries_of_observed_rows_are_kept(llama: Checkpoint, cpu: CpuRunner) -> None:
    reference = torch_runner(llama, slots=SLOTS)
    batch = step(ids(LENGTH), 0, scattered(LENGTH), observed=(3, 20, 23))
    plain = dataclasses.replace(batch, observed_rows=np.zeros(0, np.int32))
    expected = cpu.forward(plain).copy()
    assert cpu.observed_queries(plain).shape[1] == 0
    assert np.array_equal(cpu.forward(batch), expected)
    reference.forward(batch)
    found, other = cpu.observed_queries(batch), reference.observed_queries(batch)
    config = cpu.config
    assert found.shape == (config.layers, 3, config.query_heads, config.head_dim)
    np.testing.assert_allclose(found, other, atol=2e-5)


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "bf16", "i8", "i4"])
@pytest.mark.parametrize("reach", [2, 4000], ids=["close", "far apart"])
def test_moved_keys_are_the_naive_rotation_rounded_once(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName, reach: int
) -> None:
    """Element by element: (a, b) turns by shift x frequency."""
    runner = CpuRunner.load(
        llama, slots=SLOTS, threads=2, weights="f32", kv_cache_dtype=kv_cache_dtype
    )
    slots = scattered(LENGTH)
    runner.forward(step(ids(LENGTH), 0, slots))
    cells = all_cells(runner, slots).reshape(-1)
    shift = np.random.default_rng(3).integers(-reach, reach, len(cells)).astype(np.int32)
    keys, values = runner.cells.read(cells)
    expected = naive_rotation(keys, shift, runner.config.rope_theta)
    runner.cells.put(cells, runner.cells.take(cells, shift))
    moved, same = runner.cells.read(cells)
    runner.cells.write(cells, expected, values)
    angles = 1e-6 * reach  # which are float32
    largest = np.abs(expected).max()
    rounding = {
        "f32": 1e-5, "f16": 2e-3, "bf16": largest / 128, "i8": 1.01 * largest / 127,
        "i4": largest / 8,
    }[kv_cache_dtype]  # fmt: skip
    np.testing.assert_allclose(moved, runner.cells.read(cells)[0], atol=rounding + angles)
    np.testing.assert_array_equal(same, values)
    runner.close()


def naive_rotation(keys: np.ndarray, shift: np.ndarray, theta: float) -> np.ndarray:
    half = keys.shape[1] // 2
    moved = np.empty_like(keys)
    for one, (key, places) in enumerate(zip(keys, shift, strict=True)):
        for d in range(half):
            angle = places * theta ** (-d / half)
            a, b = key[d], key[half + d]
            moved[one, d] = a * np.cos(angle) - b * np.sin(angle)
            moved[one, half + d] = b * np.cos(angle) + a * np.sin(angle)
    return moved
