"""Layers with a state in PyTorch: transformers' logits and tokens, from any part of a prompt on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from tiny_checkpoints import VOCAB, reference_model, write_variant

from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.torch.runner import load_torch_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("granitehybrid", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return reference_model(folder, context=512)


def expected(reference: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.numpy()


def stepper(folder: Path) -> Stepper:
    return Stepper(load_torch_runner(open_checkpoint(folder), slots=600, states=8))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def test_packed_and_chunked_prompts_match_transformers(
    folder: Path, reference: torch.nn.Module
) -> None:
    steps = stepper(folder)
    short, long, late = Sequence(prompt(20)), Sequence(prompt(80, 1)), Sequence(prompt(50, 2))
    first = steps.step([(short, 19), (long, 40)])
    second = steps.step([(short, 1), (long, 39), (late, 2)])
    third = steps.step([(late, 48), (long, 1)])
    for sequence, parts in (
        (short, [first[0], second[0]]),
        (long, [first[1], second[1], third[1]]),
        (late, [second[2], third[0]]),
    ):
        logits = expected(reference, sequence.tokens)
        np.testing.assert_allclose(np.concatenate(parts), logits, rtol=0, atol=1e-4)


def test_greedy_tokens_equal_transformers_cold_and_from_a_snapshot(
    folder: Path, reference: torch.nn.Module
) -> None:
    steps = stepper(folder)
    states = steps.runner.states
    assert states is not None
    cold = Sequence(prompt(75))
    steps.prefill(part := Sequence(cold.tokens[:50]))
    assert part.state is not None
    states.copy(part.state, 5)
    cold.slots, cold.state = list(part.slots), part.state
    warm = Sequence(list(cold.tokens), slots=list(part.slots), state=5)
    logits = [steps.prefill(each)[-1] for each in (cold, warm)]
    steps.decode([cold, warm], logits, count=64)
    assert cold.tokens == warm.tokens
    assert cold.tokens[75:] == expected(reference, cold.tokens)[74:-1].argmax(-1).tolist()


def test_states_are_float32_whatever_weights_are(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    space = checkpoint.config.state_space
    assert space is not None
    exact, rounded = (
        load_torch_runner(checkpoint, slots=100, states=3, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for runner in (exact, rounded):
        assert runner.states is not None
        assert runner.states.nbytes == 3 * space.state_bytes
    # K and V of the one layer with attention: slots, heads, numbers, bytes.
    assert exact.kv_bytes - 3 * space.state_bytes == 2 * 100 * 2 * 32 * 4
    logits = [Stepper(runner).prefill(Sequence(prompt(60))) for runner in (exact, rounded)]
    assert np.linalg.norm(logits[1] - logits[0]) < 0.05 * np.linalg.norm(logits[0])
