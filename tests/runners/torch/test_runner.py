"""TorchRunner against transformers: every family, in every way a prompt can reach the model."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from tiny_checkpoints import STATELESS, VOCAB, reference_model, write_tiny, write_variant

from midfill.errors import OptionError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.torch.runner import load_torch_runner

TOLERANCE = 1e-4
GRAPHS = "cuda with graphs"
DEVICES = ["cpu", "cuda", GRAPHS] if torch.cuda.is_available() else ["cpu"]


@dataclass
class Subject:
    """A checkpoint under test and transformers' model of it."""

    checkpoint: Checkpoint
    reference: torch.nn.Module
    device: str

    def stepper(self, dtype: torch.dtype = torch.float32) -> Stepper:
        captured = (1, 4, 64) if self.device == GRAPHS else ()
        device = self.device.partition(" ")[0]
        runner = load_torch_runner(
            self.checkpoint, slots=1024, device=device, dtype=dtype, captured_rows=captured
        )
        return Stepper(runner)

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits [len(tokens), vocab], computed in one go."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=STATELESS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Subject:
    folder = write_variant(request.param, tmp_path_factory.mktemp(request.param))
    checkpoint = open_checkpoint(folder)
    return Subject(checkpoint, reference_model(folder, checkpoint.config.context), device)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def assert_logits_match(actual: np.ndarray, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=TOLERANCE)


def assert_greedy(subject: Subject, sequence: Sequence, prompt_length: int) -> None:
    """Every token after the prompt is the one transformers would have chosen there."""
    chosen = subject.expected(sequence.tokens).argmax(-1)[prompt_length - 1 : -1]
    assert sequence.tokens[prompt_length:] == chosen.tolist()


def test_packed_prompts_match_transformers(subject: Subject) -> None:
    sequences = [Sequence(prompt(length, seed=length)) for length in (100, 1, 37)]
    chunks = [(sequence, sequence.remaining) for sequence in sequences]
    for sequence, logits in zip(sequences, subject.stepper().step(chunks), strict=True):
        assert_logits_match(logits, subject.expected(sequence.tokens))


def test_chunked_prefill_matches_transformers(subject: Subject) -> None:
    sequence = Sequence(prompt(100))
    logits = subject.stepper().prefill(sequence, chunk_sizes=[30, 1, 2, 50])
    assert_logits_match(logits, subject.expected(sequence.tokens))


def test_warm_prompt_matches_transformers(subject: Subject) -> None:
    stepper = subject.stepper()
    earlier = Sequence(prompt(90))
    stepper.prefill(earlier)
    warm = Sequence(earlier.tokens[:60] + prompt(40, seed=1), slots=earlier.slots[:60])
    logits = stepper.prefill(warm)
    assert_logits_match(logits, subject.expected(warm.tokens)[60:])


def test_chunks_and_decodes_of_different_requests_share_a_step(subject: Subject) -> None:
    stepper = subject.stepper()
    short, long, late = Sequence(prompt(20)), Sequence(prompt(80, seed=1)), Sequence(prompt(50, 2))
    first = stepper.step([(short, 19), (long, 40)])
    second = stepper.step([(short, 1), (long, 39), (late, 25)])
    third = stepper.step([(late, 25), (long, 1)])
    for sequence, parts in (
        (short, [first[0], second[0]]),
        (long, [first[1], second[1], third[1]]),
        (late, [second[2], third[0]]),
    ):
        assert_logits_match(np.concatenate(parts), subject.expected(sequence.tokens))


def test_greedy_tokens_equal_transformers_cold_chunked_and_warm(subject: Subject) -> None:
    stepper = subject.stepper()
    tokens = prompt(75)
    cold, chunked = Sequence(list(tokens)), Sequence(list(tokens))
    logits = [stepper.prefill(cold)[-1], stepper.prefill(chunked, chunk_sizes=[40, 7])[-1]]
    warm = Sequence(list(tokens), slots=cold.slots[:50])
    logits.append(stepper.prefill(warm)[-1])
    other = Sequence(prompt(10, seed=1))
    logits.append(stepper.prefill(other)[-1])

    stepper.decode([cold, chunked, warm, other], logits, count=64)

    assert_greedy(subject, cold, 75)
    assert chunked.tokens == cold.tokens
    assert warm.tokens == cold.tokens
    assert_greedy(subject, other, 10)


def test_logits_come_only_for_the_rows_asked_for(subject: Subject) -> None:
    stepper = subject.stepper()
    sequences = [Sequence(prompt(12)), Sequence(prompt(9, seed=1))]
    batch = stepper.pack([(sequence, sequence.remaining) for sequence in sequences])
    runner = stepper.runner
    everything = runner.logits_ops.to_numpy(runner.forward(batch)).copy()
    rows = np.array([3, 11, 20], np.int32)
    chosen = runner.logits_ops.to_numpy(runner.forward(replace(batch, logit_rows=rows)))
    assert chosen.dtype == np.float32
    np.testing.assert_allclose(chosen, everything[rows], rtol=0, atol=1e-5)


def test_bfloat16_halves_the_bytes_and_stays_near_float32(subject: Subject) -> None:
    tokens = prompt(60)
    exact = subject.stepper()
    rounded = subject.stepper(torch.bfloat16)
    config, experts = subject.checkpoint.config, subject.checkpoint.config.experts
    corrections = experts is not None and experts.corrected  # which stay in float32
    kept = 4 * experts.count * len(config.expert_layers) if experts and corrections else 0
    assert (rounded.runner.weight_bytes - kept) * 2 == exact.runner.weight_bytes - kept
    assert rounded.runner.kv_bytes * 2 == exact.runner.kv_bytes
    expected = exact.prefill(Sequence(tokens))
    actual = rounded.prefill(Sequence(tokens), chunk_sizes=[30])
    assert actual.dtype == np.float32
    if subject.checkpoint.config.experts is None:
        assert np.linalg.norm(actual - expected) < 0.05 * np.linalg.norm(expected)
        return
    # A row that is sent to another expert, since two were about as good, is far away: in more than
    # half of the rows, where many experts are chosen in two layers.
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.quantile(errors, 0.3) < 0.05


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_activations_match_transformers(
    family: str, activation: str, tmp_path: Path, device: str
) -> None:
    folder = write_tiny(family, tmp_path, hidden_act=activation)
    subject = Subject(open_checkpoint(folder), reference_model(folder, context=512), device)
    sequence = Sequence(prompt(20))
    logits = subject.stepper().prefill(sequence)
    assert_logits_match(logits, subject.expected(sequence.tokens))


def test_kv_bytes_are_keys_and_values_of_all_slots(tmp_path: Path) -> None:
    runner = load_torch_runner(open_checkpoint(write_tiny("llama", tmp_path)), slots=100)
    assert runner.slots == 100
    assert runner.kv_bytes == 2 * 3 * 100 * 2 * 32 * 4  # K and V, layers, slots, heads, dim, bytes


def test_latent_attention_keeps_one_latent_and_one_rotated_key_per_token(tmp_path: Path) -> None:
    runner = load_torch_runner(open_checkpoint(write_tiny("deepseek2", tmp_path)), slots=100)
    assert runner.kv_bytes == 3 * 100 * (128 + 64) * 4  # layers, slots, numbers, bytes


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    tied = open_checkpoint(write_tiny("llama", tmp_path / "tied", tie_word_embeddings=True))
    apart = open_checkpoint(write_tiny("llama", tmp_path / "apart"))
    saved = (
        load_torch_runner(apart, slots=1).weight_bytes
        - load_torch_runner(tied, slots=1).weight_bytes
    )
    assert saved == VOCAB * 64 * 4


def test_a_device_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path))
    with pytest.raises(OptionError, match="--device 'cuda:99'") as caught:
        load_torch_runner(checkpoint, slots=1, device="cuda:99")
    assert "\n" not in str(caught.value)
