"""Steps of random models of real shapes: that they run, and what they take at least."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu_steps import (
    SHAPES,
    STEPS,
    RandomCheckpoint,
    bound_of,
    seconds_of,
    step_of,
    steps_table,
)
from midfill.models.config import Experts, ModelConfig
from midfill.runners.torch.runner import TorchRunner, load_torch_runner

SMALL = replace(
    SHAPES["135m"], layers=1, hidden=64, query_heads=4, kv_heads=2, head_dim=16, ffn=64, vocab=200
)
MIXED = replace(
    SMALL, family="qwen3moe", qk_norm=True, tied_embeddings=False,
    experts=Experts(count=16, per_token=2, ffn=32, normalised=True),
)  # fmt: skip


def runner_of(config: ModelConfig) -> TorchRunner:
    return load_torch_runner(RandomCheckpoint(config), slots=100_000)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [SMALL, MIXED], ids=["dense", "mixture"])
def test_a_step_runs_and_gives_finite_logits(config: ModelConfig) -> None:
    runner = runner_of(config)
    batch = step_of(config, 2, 3, 10)
    logits = runner.forward(batch)
    assert logits.shape == (2, config.vocab)
    assert np.isfinite(logits).all()
    assert seconds_of(runner, batch, 1) > 0


class TestBound:
    def bytes_of(self, config: ModelConfig, step: tuple[int, int, int]) -> float:
        """The bytes of a step, as the seconds that they take at one byte per second."""
        return bound_of(config, runner_of(config).weight_bytes // 2, step, 1.0, 1e30)

    def test_one_token_reads_all_weights_and_its_keys_and_values(self) -> None:
        weights = runner_of(SMALL).weight_bytes // 2
        assert self.bytes_of(SMALL, (1, 1, 9)) == weights + 10 * 2 * 2 * 16 * 2

    def test_a_token_reads_the_experts_that_it_is_sent_to(self) -> None:
        one = 6 * MIXED.hidden * 32
        alone, many = (self.bytes_of(MIXED, (1, rows, 0)) for rows in (1, 10_000))
        assert many - alone == pytest.approx(14 * one + 9_999 * 2 * 2 * 16 * 2)

    def test_operations_bind_long_prompts(self) -> None:
        weights = runner_of(SMALL).weight_bytes // 2
        assert bound_of(SMALL, weights, (1, 4000, 0), 1e30, 1.0) > 4000 * (weights - 200 * 128)


def test_the_table_has_a_row_per_shape_and_step() -> None:
    steps = [
        {"shape": "a", "step": step, "graphs": 0.001, "eager": 0.004, "bound": 0.0005}
        for step in STEPS
    ]
    table = steps_table(
        {
            "device": "GPU",
            "torch": torch.__version__,
            "bandwidth": 1e12,
            "rate": 1e12,
            "steps": steps,
        }
    )
    assert [row["times as fast"] for row in table.rows] == ["4.0"] * len(STEPS)
    assert table.rows[0]["of the bound"] == "50%"
