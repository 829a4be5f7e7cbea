"""FusedLayers against the decoder in plain torch: every family that it runs, any make-up of a step.

Runs on a GPU, or, where Triton interprets its kernels (TRITON_INTERPRET=1), on the CPU.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from tiny_checkpoints import VOCAB, write_variant
from triton_device import TRITON_DEVICE, needs_triton

from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.runner import TorchRunner, load_torch_runner

pytestmark = needs_triton
PROCESSORS = 4


def runner_of(folder: Path) -> TorchRunner:
    return load_torch_runner(open_checkpoint(folder), slots=512, device=TRITON_DEVICE)


def is_fusible(runner: TorchRunner) -> bool:
    from midfill.runners.torch.fused_layers import is_fusible

    return is_fusible(runner.config)


def fused_logits(runner: TorchRunner, batch: ForwardBatch, padding: int = 0) -> np.ndarray:
    """The logits that the fused layers lead to, for a batch padded with so many rows."""
    from midfill.runners.torch.fused_layers import FusedLayers
    from midfill.runners.torch.kernels.attention import rows_per_tile
    from midfill.runners.torch.kernels.experts import expand_experts
    from midfill.runners.torch.kernels.step_inputs import InputBuffers

    decoder, config = runner.decoder, runner.config
    decoder.grouped_experts = expand_experts
    group = config.query_heads // config.kv_heads
    tile = 1 if batch.rows == batch.requests else rows_per_tile(group)
    buffers = InputBuffers(256, 4096, decoder.device)
    buffers.load(batch, batch.rows + padding, tile)
    with torch.inference_mode():
        normed = FusedLayers(decoder, PROCESSORS).run(buffers.inputs(batch.rows + padding, tile))
        rows = normed[torch.from_numpy(batch.logit_rows).to(decoder.device)]
        logits = rows @ decoder.weights.head.T / config.logits_divisor
    return logits.float().cpu().numpy()


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


STEPS = ([(0, 34), (1, 1)], [(0, 5), (2, 3)], [(0, 1), (1, 1), (2, 1)])
"""(sequence, rows) of each step: chunks beside a decode, two chunks, decodes alone."""
FUSED = (
    "llama-biased", "granite", "qwen3", "qwen3moe", "starcoder2", "mistral", "gemma3", "phi3-long",
    "gpt-oss",
)  # fmt: skip
NOT_FUSED = ("deepseek2", "granitehybrid", "qwen3next", "olmo2", "gemma3n")


@pytest.mark.parametrize("variant", FUSED)
def test_logits_and_kv_are_those_of_plain_torch(variant: str, tmp_path: Path) -> None:
    folder = write_variant(variant, tmp_path)
    plain, fused = runner_of(folder), runner_of(folder)
    assert is_fusible(plain)
    steppers = Stepper(plain), Stepper(fused)
    sequences = [[Sequence(prompt(n, seed=n)) for n in (40, 2, 4)] for _ in steppers]
    for step in STEPS:
        batch, same = (
            stepper.pack([(own[number], rows) for number, rows in step])
            for stepper, own in zip(steppers, sequences, strict=True)
        )
        expected = plain.logits_ops.to_numpy(plain.forward(batch))
        np.testing.assert_allclose(fused_logits(fused, same, padding=3), expected, atol=1e-4)
    caches = fused.decoder.kv_cache, plain.decoder.kv_cache
    for actual, wanted in zip(*((cache.keys, cache.values) for cache in caches), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", NOT_FUSED)
def test_what_the_kernels_lack_is_left_to_plain_torch(variant: str, tmp_path: Path) -> None:
    assert not is_fusible(runner_of(write_variant(variant, tmp_path)))
