"""The delta rule in PyTorch: transformers' logits and tokens, from any part of a prompt on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from tiny_checkpoints import DELTA_RULE, VOCAB, reference_model, write_variant

from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.torch.runner import load_torch_runner


@pytest.fixture(scope="module", params=DELTA_RULE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp(request.param))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def test_mixed_steps_match_transformers_and_so_do_answers_from_a_snapshot(folder: Path) -> None:
    reference = reference_model(folder, context=512)

    def expected(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits: torch.Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.numpy()

    steps = Stepper(load_torch_runner(open_checkpoint(folder), slots=600, states=8))
    states = steps.runner.states
    assert states is not None
    short, long = Sequence(prompt(20)), Sequence(prompt(75, 1))
    first = steps.step([(short, 19), (long, 40)])
    assert long.state is not None
    states.copy(long.state, 5)
    warm = Sequence(list(long.tokens), list(long.slots), state=5)
    second = steps.step([(short, 1), (long, 35), (warm, 35)])
    for sequence, parts in ((short, (first[0], second[0])), (long, (first[1], second[1]))):
        found = np.concatenate(parts)
        np.testing.assert_allclose(found, expected(sequence.tokens), rtol=0, atol=1e-4)
    steps.decode([short, long, warm], [logits[-1] for logits in second], count=64)
    for sequence, start in ((short, 20), (long, 75)):
        following = expected(sequence.tokens)[start - 1 : -1].argmax(-1)
        assert sequence.tokens[start:] == following.tolist()
    assert warm.tokens == long.tokens


def test_states_are_float32_whatever_weights_are(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    exact, rounded = (
        load_torch_runner(checkpoint, slots=100, states=3, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert checkpoint.config.state_space is not None
    for runner in (exact, rounded):
        assert runner.states is not None
        assert runner.states.nbytes == 3 * checkpoint.config.state_space.state_bytes
    logits = [Stepper(runner).prefill(Sequence(prompt(60))) for runner in (exact, rounded)]
    errors = np.linalg.norm(logits[1] - logits[0], axis=1) / np.linalg.norm(logits[0], axis=1)
    assert np.median(errors) < 0.1  # rows near a tie of two experts may be sent to the other
