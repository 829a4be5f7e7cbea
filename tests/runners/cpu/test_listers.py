"""Sparse prefill in both runners: listed keys and no others, in every format of the KV cache."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from sparse_planners import MadePlanner, everything, scattered, with_planners
from tiny_checkpoints import VOCAB, write_variant

from midfill.config import KVCacheDtypeName
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import LayerProbe, query_blocks
from midfill.runners.forward.page_selection import Search
from midfill.runners.forward.runner import Runner
from midfill.runners.forward.tree_search import TreeRule
from serving import torch_runner

PREFIX, ROWS = 200, 300


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = cpu_runner(llama)
    yield runner
    runner.close()


def cpu_runner(
    checkpoint: Checkpoint, kv_cache_dtype: KVCacheDtypeName = "f32", threads: int = 2
) -> CpuRunner:
    return CpuRunner.load(
        checkpoint, slots=1500, threads=threads, weights="f32", kv_cache_dtype=kv_cache_dtype
    )


def text(length: int, seed: int = 0) -> Sequence:
    return Sequence(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def prefill(runner: Runner, planner: MadePlanner | None, rows: int = ROWS) -> np.ndarray:
    """Logits of a chunk of ``rows`` after a dense prefix."""
    stepper, sequence = Stepper(runner), text(PREFIX + rows)
    stepper.step([(sequence, PREFIX)])
    batch = stepper.pack([(sequence, rows)])
    if planner is not None:
        batch = with_planners(batch, planner)
    return runner.forward(batch).copy()


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "bf16", "i8", "i4"])
def test_lists_of_everything_give_the_bits_of_dense_attention(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName
) -> None:
    runner = cpu_runner(llama, kv_cache_dtype)
    planner = MadePlanner(everything)
    assert np.array_equal(prefill(runner, planner), prefill(runner, None))
    assert len(planner.lists) == runner.config.layers
    runner.close()


@pytest.mark.parametrize("rows", [1, 2, 9, 63, 64, 65, ROWS])
def test_listed_keys_give_the_logits_of_masked_attention_in_torch(
    llama: Checkpoint, runner: CpuRunner, rows: int
) -> None:
    planners = [MadePlanner(scattered), MadePlanner(scattered)]
    found = prefill(runner, planners[0], rows)
    expected = prefill(torch_runner(llama, slots=1500), planners[1], rows)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
    for layer in range(runner.config.layers):
        np.testing.assert_array_equal(planners[0].pairs[layer], planners[1].pairs[layer])
    assert not np.allclose(found, prefill(runner, None, rows), atol=1e-3)


def test_pairs_are_rows_times_listed_keys(runner: CpuRunner) -> None:
    planner = MadePlanner(scattered)
    prefill(runner, planner)
    heads = runner.config.query_heads
    for layer, lists in enumerate(planner.lists):
        expected = np.zeros(heads, np.int64)
        for unit in range(query_blocks(ROWS) * heads):
            rows = min(64, ROWS - unit // heads * 64)
            spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]]
            expected[unit % heads] += rows * (spans[:, 1] - spans[:, 0]).sum()
        np.testing.assert_array_equal(planner.pairs[layer], expected)


def look(probe: LayerProbe) -> list[np.ndarray]:
    rows = min(64, probe.rows)
    return [*probe.masses(rows), probe.mean_queries(64), probe.mean_keys(64), probe.mean_keys(32)]


@pytest.mark.parametrize("rows", [1, 7, 40, 64, 200])
@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "bf16", "i8"])
def test_a_planner_sees_the_same_in_both_runners(
    llama: Checkpoint, rows: int, kv_cache_dtype: KVCacheDtypeName
) -> None:
    runner = cpu_runner(llama, kv_cache_dtype)
    planners = [MadePlanner(look=look), MadePlanner(look=look)]
    prefill(runner, planners[0], rows)
    prefill(torch_runner(llama, slots=1500), planners[1], rows)
    tolerance = {"f32": 1e-4, "f16": 5e-3, "bf16": 0.05, "i8": 0.2}[kv_cache_dtype]
    for found, expected in zip(planners[0].seen, planners[1].seen, strict=True):
        for one, other in zip(found, expected, strict=True):  # type: ignore[call-overload]
            np.testing.assert_allclose(one, other, atol=tolerance)
    runner.close()


SEARCHES = [
    TreeRule(blocks=20, block=2, window=24, sinks=5),
    TreeRule(blocks=13, block=3, window=70, sinks=0, search=Search.FIRSTS),
    TreeRule(blocks=100, block=2, window=24, sinks=5),
    TreeRule(blocks=0, window=24),
]


@pytest.mark.parametrize("rows", [1, 40, 64, 65, ROWS])
@pytest.mark.parametrize("stride", [1, 2])
def test_blocks_of_rows_find_the_same_in_both_runners(
    llama: Checkpoint, runner: CpuRunner, rows: int, stride: int
) -> None:
    """Also where the first blocks read everything and only later ones search."""
    planners = [
        MadePlanner(look=lambda probe: [probe.search(rule, stride) for rule in SEARCHES])
        for _ in range(2)
    ]
    prefill(runner, planners[0], rows)
    prefill(torch_runner(llama, slots=1500), planners[1], rows)
    for found, expected in zip(planners[0].seen, planners[1].seen, strict=True):
        for one, other, rule in zip(found, expected, SEARCHES, strict=True):  # type: ignore[call-overload]
            assert one.shape == (query_blocks(rows), runner.config.query_heads, rule.width)
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kv_cache_dtype", ["f16", "bf16"])
def test_searches_find_mostly_the_same_among_rounded_keys(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName
) -> None:
    rounded = cpu_runner(llama, kv_cache_dtype)
    planners = [MadePlanner(look=lambda probe: probe.search(SEARCHES[0], 2)) for _ in range(2)]
    prefill(rounded, planners[0])
    prefill(torch_runner(llama, slots=1500), planners[1])
    for found, expected in zip(planners[0].seen, planners[1].seen, strict=True):
        assert np.mean(np.equal(found, expected)) > 0.8  # type: ignore[call-overload]
    rounded.close()


@pytest.mark.parametrize("kv_cache_dtype", ["i8", "i4"])
def test_quantised_pools_are_not_searched(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName
) -> None:
    quantised = cpu_runner(llama, kv_cache_dtype)
    planner = MadePlanner(look=lambda probe: probe.search(SEARCHES[0], 2))
    with pytest.raises(ValueError, match="not quantised"):
        prefill(quantised, planner)
    quantised.close()


def test_masses_are_sums_of_softmax_weights_by_key_and_by_distance(runner: CpuRunner) -> None:
    planner = MadePlanner(look=lambda probe: probe.masses(min(64, probe.rows)))
    prefill(runner, planner)
    for columns, diagonals in planner.seen:  # type: ignore[misc]
        assert columns.shape == diagonals.shape == (runner.config.query_heads, PREFIX + ROWS)
        np.testing.assert_allclose(columns.sum(axis=1), 64, rtol=1e-4)
        np.testing.assert_allclose(diagonals.sum(axis=1), 64, rtol=1e-4)
        assert (columns >= 0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_company_and_threads_change_no_bit(
    llama: Checkpoint, runner: CpuRunner, threads: int
) -> None:
    expected = prefill(runner, MadePlanner(scattered))
    dense = prefill(runner, None, 40)
    other = cpu_runner(llama, threads=threads)
    stepper = Stepper(other)
    decoding, sparse, whole = text(400, 1), text(PREFIX + ROWS), text(PREFIX + 40)
    stepper.step([(decoding, 399), (sparse, PREFIX), (whole, PREFIX)])
    batch = stepper.pack([(decoding, 1), (sparse, ROWS), (whole, 40)])
    found = other.forward(with_planners(batch, None, MadePlanner(scattered), None))
    assert np.array_equal(found[1 : 1 + ROWS], expected)
    assert np.array_equal(found[1 + ROWS :], dense)
    other.close()


def test_windowed_layers_keep_their_window(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("gemma3", tmp_path / "gemma3"))
    runner = cpu_runner(checkpoint)
    planner = MadePlanner(everything)
    assert np.array_equal(prefill(runner, planner), prefill(runner, None))
    config = runner.config
    full = [layer for layer in range(config.layers) if config.window_of(layer) is None]
    assert sorted(planner.pairs) == full
    runner.close()
