"""Latent attention on the CPU: the same bits however a prompt is computed, with any weights.

That they are the right ones is compared with transformers in tests/runners.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from pass_invariants import check_company, check_threads_and_chunks
from tiny_checkpoints import VOCAB, reference_model, write_tiny

from midfill.config import KVCacheDtypeName, WeightsOption
from midfill.kernels.cpu.latent.data import UNIT_ROWS
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner

SLOTS = 1000
LENGTH = 300  # longer than a segment of keys


@pytest.fixture(scope="module", params=[None, 64], ids=["q", "q_a and q_b"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("latent")
    return open_checkpoint(write_tiny("deepseek2", folder, q_lora_rank=request.param))


@pytest.fixture(scope="module", params=["f32", "q4"])
def runners(
    request: pytest.FixtureRequest, checkpoint: Checkpoint
) -> Iterator[tuple[CpuRunner, CpuRunner]]:
    """A runner on one thread, and one on two."""
    weights: WeightsOption = request.param
    pair = [
        CpuRunner.load(
            checkpoint, slots=SLOTS, threads=threads, weights=weights, kv_cache_dtype="f32"
        )
        for threads in (1, 2)
    ]
    yield pair[0], pair[1]
    for runner in pair:
        runner.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def test_a_prompt_has_the_same_bits_in_any_chunks_and_on_any_threads(
    runners: tuple[CpuRunner, CpuRunner],
) -> None:
    check_threads_and_chunks(
        runners, prompt(LENGTH), [1, 3, UNIT_ROWS, UNIT_ROWS + 1, 2 * UNIT_ROWS, 5]
    )


def test_rows_of_other_requests_change_no_bit(runners: tuple[CpuRunner, CpuRunner]) -> None:
    check_company(*runners, [prompt(length, length) for length in (70, 1, 40, 200)])


def test_a_warm_prompt_has_the_bits_of_a_cold_one(runners: tuple[CpuRunner, CpuRunner]) -> None:
    _, runner = runners
    tokens = prompt(150)
    stepper = Stepper(runner)
    earlier = Sequence(list(tokens))
    cold = stepper.prefill(earlier)
    warm = Sequence(list(tokens), slots=earlier.slots[:110])
    np.testing.assert_array_equal(stepper.prefill(warm), cold[110:])


CODER_V2_LITE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
}
"""The attention of DeepSeek-Coder-V2-Lite."""


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("f32", 2e-5),
        # Each has kernels of its own to be compiled.
        pytest.param("f16", 0.01, marks=pytest.mark.slow),
        pytest.param("bf16", 0.05, marks=pytest.mark.slow),
    ],
)
def test_attention_of_real_widths_is_that_of_transformers(
    name: KVCacheDtypeName, bound: float, tmp_path: Path
) -> None:
    folder = write_tiny("deepseek2", tmp_path, **CODER_V2_LITE)
    runner = CpuRunner.load(
        open_checkpoint(folder), slots=SLOTS, threads=2, weights="f32", kv_cache_dtype=name
    )
    assert runner.cells.layout.widths == (576 * (4 if name == "f32" else 2),)
    tokens = prompt(LENGTH)
    found = Stepper(runner).prefill(Sequence(tokens), [*[1] * 5, 100])
    runner.close()
    with torch.inference_mode():
        reference = reference_model(folder, context=512)
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < bound
