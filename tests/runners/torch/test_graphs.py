"""CUDA graphs against the same step without them. What a model computes is in test_runner.py."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from tiny_checkpoints import VOCAB, write_tiny

from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.torch.runner import TorchRunner, load_torch_runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def runners(tmp_path: Path) -> tuple[TorchRunner, TorchRunner]:
    """A runner with graphs of up to 8 rows, and one without."""
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path))
    plain = load_torch_runner(checkpoint, slots=2048, device="cuda")
    captured = load_torch_runner(checkpoint, slots=2048, device="cuda", captured_rows=(1, 8))
    assert captured.graphs is not None
    return captured, plain


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 300])
def test_any_number_of_rows_runs(rows: int, runners: tuple[TorchRunner, TorchRunner]) -> None:
    logits = []
    for runner in runners:
        sequences = [Sequence(prompt(rows, seed)) for seed in range(2)]
        (found, *_) = Stepper(runner).step([(one, rows) for one in sequences])
        logits.append(found)
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)


def test_padding_writes_nothing(runners: tuple[TorchRunner, TorchRunner]) -> None:
    captured, _ = runners
    assert not captured.decoder.kv_cache.keys.any()
    stepper, sequence = Stepper(captured), Sequence(prompt(5, 0))
    stepper.prefill(sequence)
    written = captured.decoder.kv_cache.keys[0].any(dim=-1).any(dim=-1).nonzero().flatten()
    assert sorted(written.tolist()) == sorted(sequence.slots)


def test_the_largest_logits_are_known_without_a_further_look(
    runners: tuple[TorchRunner, TorchRunner],
) -> None:
    captured, _ = runners
    stepper = Stepper(captured)
    for length in (1, 6, 3):
        batch = stepper.pack([(Sequence(prompt(length, length)), length)])
        logits = captured.forward(batch)
        assert captured.argmax_tokens(logits) == logits.argmax(dim=-1).tolist()


def test_steps_whose_queries_are_observed_are_left_to_plain_torch(
    runners: tuple[TorchRunner, TorchRunner],
) -> None:
    captured, _ = runners
    graphs = captured.graphs
    assert graphs is not None
    batch = Stepper(captured).pack([(Sequence(prompt(4, 0)), 4)])
    assert graphs.accepts(batch)
    assert not graphs.accepts(replace(batch, observed_rows=np.array([1], np.int32)))
