"""Layers with a state on the CPU: transformers' logits, the same bits however they are computed."""

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
from tiny_checkpoints import VOCAB, reference_model, write_tiny, write_variant

from midfill.config import WeightsOption
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner

SLOTS, STATES = 1000, 12
LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("granitehybrid", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module", params=["f32", "q8"])
def weights(request: pytest.FixtureRequest) -> WeightsOption:
    return request.param


@pytest.fixture(scope="module")
def runners(folder: Path, weights: WeightsOption) -> Iterator[tuple[CpuRunner, CpuRunner]]:
    """A runner on one thread, and one on two."""
    pair = [
        CpuRunner.load(
            open_checkpoint(folder), slots=SLOTS, states=STATES, threads=threads, weights=weights,
            kv_cache_dtype="f32",
        )
        for threads in (1, 2)
    ]  # fmt: skip
    yield pair[0], pair[1]
    for runner in pair:
        runner.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def test_logits_and_greedy_tokens_equal_transformers(
    folder: Path, runners: tuple[CpuRunner, CpuRunner], weights: WeightsOption
) -> None:
    stepper = Stepper(runners[1])
    sequence, other = Sequence(prompt(60)), Sequence(prompt(33, seed=1))
    logits = stepper.prefill(sequence, [7, 1, 30])
    stepper.decode([sequence, other], [logits[-1], stepper.prefill(other)[-1]], count=64)
    reference = reference_model(folder, context=512)
    for each, start in ((sequence, 60), (other, 33)):
        with torch.inference_mode():
            expected = reference(torch.tensor([each.tokens]), use_cache=False).logits[0].numpy()
        if weights == "f32":
            assert each.tokens[start:] == expected[start - 1 : -1].argmax(-1).tolist()
        if each is sequence:
            error = np.linalg.norm(logits - expected[:60]) / np.linalg.norm(expected[:60])
            assert error < (1e-5 if weights == "f32" else 0.1)


def test_a_prompt_has_the_same_bits_in_any_chunks_and_on_any_threads(
    runners: tuple[CpuRunner, CpuRunner],
) -> None:
    check_threads_and_chunks(runners, prompt(LENGTH), [1, 2, 1, 3, 64, 65, 5])


def test_rows_of_other_requests_change_no_bit(runners: tuple[CpuRunner, CpuRunner]) -> None:
    check_company(*runners, [prompt(length, length) for length in (70, 1, 2, 110)])


def test_a_snapshot_goes_on_with_the_bits_of_a_cold_prompt(
    runners: tuple[CpuRunner, CpuRunner],
) -> None:
    check_snapshots(*runners, prompt)


def test_layer_by_layer_it_is_the_same(runners: tuple[CpuRunner, CpuRunner]) -> None:
    check_layer_by_layer(runners[1], prompt(40))


def test_requests_need_states_of_their_own(runners: tuple[CpuRunner, CpuRunner]) -> None:
    stepper = Stepper(runners[0])
    first, second = Sequence(prompt(3), state=1), Sequence(prompt(4), state=1)
    with pytest.raises(ValueError, match="2 requests need as many states, not"):
        stepper.step([(first, 3), (second, 4)])


GRANITE_H_1B = {
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
"""A pair of layers as wide as Granite 4.0-H 1B's."""


def test_layers_of_real_widths_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_tiny("granitehybrid", tmp_path, **GRANITE_H_1B)
    runner = CpuRunner.load(
        open_checkpoint(folder), slots=300, states=2, threads=2, weights="f32", kv_cache_dtype="f32"
    )
    assert runner.states is not None
    assert runner.states.nbytes == 2 * 4 * (48 * 64 * 128 + 3 * (48 * 64 + 2 * 128))
    tokens = prompt(60)
    found = Stepper(runner).prefill(Sequence(tokens), [1, 1, 30])
    runner.close()
    with torch.inference_mode():
        reference = reference_model(folder, context=512)
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < 2e-5
