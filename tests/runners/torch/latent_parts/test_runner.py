"""A model whose latents are kept by two processes, against the formulas."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from naive_latents import CPU, naive_logits, text_batch
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions
from midfill.errors import MidfillError, OptionError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.loading import check_latent_parts, load_runner
from midfill.runners.torch.latent_parts.messages import PartShape
from midfill.runners.torch.latent_parts.runner import LatentPartsRunner
from midfill.runners.torch.weights import load_weights

SLOTS, NUMBERS = 96, 64 + 64
"""Of each token, a process keeps half a latent and all that is rotated."""
SHAPE = PartShape(parts=2, slots=SLOTS, device="cpu", dtype=torch.float32, threads=1)
TEXT = np.random.default_rng(2).integers(4, 320, 40).tolist()
PROMPT = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("parts")
    return open_checkpoint(write_tiny("deepseek2", folder, hidden_size=192))


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> Iterator[LatentPartsRunner]:
    memory = 3 * SLOTS * NUMBERS * 4
    options = ModelOptions(
        backend="torch", device="cpu", latent_parts=2, threads=1, kv_memory=memory
    )
    runner = load_runner(checkpoint, options)
    assert isinstance(runner, LatentPartsRunner)
    yield runner
    runner.close()
    assert [worker.process.returncode for worker in runner._workers] == [0]


def test_two_processes_follow_the_formulas(
    runner: LatentPartsRunner, checkpoint: Checkpoint
) -> None:
    weights = load_weights(checkpoint, CPU, torch.float32)
    expected = naive_logits(checkpoint.config, weights, runner.rotation, TEXT, PROMPT)
    sums, gathers = runner.group.sums, runner.group.gathers
    rows = [runner.forward(text_batch(TEXT[:PROMPT], 0))]
    assert (runner.group.sums, runner.group.gathers) == (sums + 3, gathers + 3)
    for row in range(PROMPT, len(TEXT)):
        rows.append(runner.forward(text_batch(TEXT[: row + 1], row, by_parts=True)))
    np.testing.assert_allclose(np.concatenate(rows), expected.numpy(), rtol=0, atol=1e-4)
    steps = 1 + len(TEXT) - PROMPT
    assert (runner.group.sums, runner.group.gathers) == (sums + 3 * steps, gathers + 3)


def test_a_step_may_run_layer_by_layer(runner: LatentPartsRunner) -> None:
    batch = text_batch(TEXT, 0)
    expected = np.copy(runner.forward(batch))
    hidden = runner.embed(batch)
    for layer in range(3):
        hidden = runner.run_layers(batch, hidden, layer, layer + 1)
    np.testing.assert_array_equal(runner.compute_logits(batch, hidden), expected)


def test_a_batch_that_is_refused_reaches_no_process(runner: LatentPartsRunner) -> None:
    outside = replace(text_batch(TEXT, 0), kv_slots=np.full(len(TEXT), -(10**6), np.int32))
    plan: Any = SimpleNamespace(cells=object(), is_dense=True, by_parts=True)
    with pytest.raises(ValueError, match="latents in parts"):
        runner.forward(replace(outside, attention=(plan,)))
    runner.forward(text_batch(TEXT, 0))


def test_memory_is_that_of_all_parts(runner: LatentPartsRunner) -> None:
    """``--kv-memory`` is what each has."""
    assert runner.slots == SLOTS
    assert runner.cells.layout.widths == (NUMBERS * 4,) * 2
    assert runner.kv_bytes == 2 * 3 * SLOTS * NUMBERS * 4
    assert runner.decoder.kv_cache.bytes == runner.kv_bytes // 2


class TestCells:
    def test_kv_goes_elsewhere_and_comes_back(self, runner: LatentPartsRunner) -> None:
        """Each process's array is its own: other slots then hold what the first ones held."""
        batch = text_batch(TEXT, 0)
        runner.forward(batch)
        expected = np.copy(runner.forward(text_batch(TEXT, len(TEXT) - 1)))
        cells = np.concatenate([np.arange(40) + layer * SLOTS for layer in range(3)])
        dumped = runner.cells.dump(cells.astype(np.int32))
        assert not np.array_equal(dumped[0], dumped[1])
        runner.cells.restore((cells + 45).astype(np.int32), dumped)
        last = text_batch(TEXT, len(TEXT) - 1)
        moved = replace(last, kv_slots=last.kv_slots + 45, write_slots=last.write_slots + 45)
        np.testing.assert_array_equal(runner.forward(moved), expected)

    def test_cells_are_read_written_taken_and_put(self, runner: LatentPartsRunner) -> None:
        runner.forward(text_batch(TEXT, 0))
        first, then = np.arange(4, dtype=np.int32), np.arange(50, 54, dtype=np.int32)
        keys, values = runner.cells.read(first)
        assert keys.shape == (4, 2 * 128)
        np.testing.assert_array_equal(keys, values)
        runner.cells.write(then, keys, values)
        np.testing.assert_array_equal(runner.cells.read_keys(then), keys)
        runner.cells.put(then + 10, runner.cells.take(then))
        np.testing.assert_array_equal(runner.cells.read_keys(then + 10), keys)
        shifted = runner.cells.take(then, np.full(4, 3, np.int32))
        assert shifted.arrays[0].shape == (4, 128)


def test_what_kv_is_bound_to_knows_how_latents_are_cut(
    runner: LatentPartsRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = runner.build
    assert "latents in 2 parts" in before
    turned = replace(runner.rotation, axes=-runner.rotation.axes)
    monkeypatch.setattr(runner, "rotation", turned)
    assert runner.build != before


def test_a_part_that_dies_ends_the_engines_process(checkpoint: Checkpoint) -> None:
    """In one line that says which it was; whoever started it starts it again."""
    lost = LatentPartsRunner(checkpoint, SHAPE)
    (worker,) = lost._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait(10)
    with pytest.raises(SystemExit, match=r"a step over 2 parts failed: part 1 ended \(-9\)$"):
        lost.forward(text_batch(TEXT, 0))


def test_a_part_that_cant_load_says_so(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"part 1 of the latents can't be loaded: .*no-adapter"):
        LatentPartsRunner(checkpoint, SHAPE, adapter=tmp_path / "no-adapter")


class TestLoading:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"latent_parts": 3}, "3: this model's latents have 128 numbers.*give 2, 4, 8 or 16"),
            ({"latent_parts": 2, "backend": "cpu"}, "needs --backend torch"),
            ({"latent_parts": 2, "expert_memory": 0}, "can't stand together"),
        ],
    )
    def test_one_line_says_what_to_do(
        self, checkpoint: Checkpoint, options: dict[str, Any], problem: str
    ) -> None:
        given = ModelOptions(device="cpu", **options)
        with pytest.raises(OptionError, match=f"^--latent-parts.*{problem}") as caught:
            load_runner(checkpoint, given)
        assert "\n" not in str(caught.value)

    def test_models_without_latents_are_refused(self, tiny_folder: Path) -> None:
        config: ModelConfig = open_checkpoint(tiny_folder).config
        with pytest.raises(OptionError, match="--latent-parts: this model has no latent attention"):
            check_latent_parts(config, ModelOptions(latent_parts=2))
