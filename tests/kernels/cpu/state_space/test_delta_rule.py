"""The delta rule on the CPU: transformers' logits, the same bits however they are computed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from pass_invariants import (
    check_company,
    check_layer_by_layer,
    check_snapshots,
    check_threads_and_chunks,
)
from tiny_checkpoints import DELTA_RULE, VOCAB, reference_model, write_tiny, write_variant

from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner

SLOTS, STATES = 1000, 12


def load(folder: Path, threads: int, weights: str = "f32") -> CpuRunner:
    return CpuRunner.load(
        open_checkpoint(folder), slots=SLOTS, states=STATES, threads=threads, weights=weights,
        kv_cache_dtype="f32",
    )  # fmt: skip


def expected(folder: Path, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        model = reference_model(folder, context=512)
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.numpy()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


@pytest.fixture(scope="module", params=DELTA_RULE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_and_greedy_tokens_equal_transformers(folder: Path) -> None:
    """Prefill in chunks, decodes of two lengths in one batch, and a restart from a snapshot."""
    runner = load(folder, threads=2)
    stepper, states = Stepper(runner), runner.states
    assert states is not None
    sequence, other = Sequence(prompt(60)), Sequence(prompt(33, seed=1))
    logits = stepper.prefill(sequence, [7, 1, 30])
    np.testing.assert_allclose(logits, expected(folder, sequence.tokens), rtol=0, atol=1e-4)
    assert sequence.state is not None
    warm = Sequence(list(sequence.tokens), list(sequence.slots), state=stepper.new_state())
    states.copy(sequence.state, STATES - 1)
    stepper.decode([sequence, other], [logits[-1], stepper.prefill(other)[-1]], count=64)
    for each, start in ((sequence, 60), (other, 33)):
        following = expected(folder, each.tokens)[start - 1 : -1].argmax(-1)
        assert each.tokens[start:] == following.tolist()
    assert warm.state is not None
    states.copy(STATES - 1, warm.state)
    stepper.decode([warm], [logits[-1]], count=64)
    assert warm.tokens == sequence.tokens
    runner.close()


@pytest.fixture(scope="module", params=["f32", "q8"])
def runners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[CpuRunner, CpuRunner]]:
    """A runner on one thread, and one on three, of a model with mixtures of experts."""
    written = write_variant("qwen3next", tmp_path_factory.mktemp("bits"))
    pair = (load(written, 1, request.param), load(written, 3, request.param))
    yield pair
    for runner in pair:
        runner.close()


def test_a_prompt_has_the_same_bits_in_any_chunks_and_on_any_threads(
    runners: tuple[CpuRunner, CpuRunner],
) -> None:
    check_threads_and_chunks(runners, prompt(200), [1, 2, 1, 3, 64, 65, 5])


def test_rows_of_other_requests_change_no_bit(runners: tuple[CpuRunner, CpuRunner]) -> None:
    check_company(*runners, [prompt(length, length) for length in (70, 1, 2, 110)])


def test_a_snapshot_goes_on_with_the_bits_of_a_cold_prompt(
    runners: tuple[CpuRunner, CpuRunner],
) -> None:
    check_snapshots(*runners, prompt)


def test_layer_by_layer_it_is_the_same(runners: tuple[CpuRunner, CpuRunner]) -> None:
    check_layer_by_layer(runners[1], prompt(40))


NEXT = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
"""A pair of layers with heads as many and as wide as those of Qwen3-Next-80B-A3B."""


def test_layers_of_real_widths_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_tiny("qwen3next", tmp_path, **NEXT)
    runner = load(folder, threads=2)
    assert runner.states is not None
    assert runner.states.nbytes == STATES * 4 * (32 * 128 * 128 + 3 * 8192)
    tokens = prompt(60)
    found = Stepper(runner).prefill(Sequence(tokens), [1, 1, 30])
    runner.close()
    truth = expected(folder, tokens)
    errors = np.linalg.norm(found - truth, axis=1) / np.linalg.norm(truth, axis=1)
    assert errors.max() < 2e-5
