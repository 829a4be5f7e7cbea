"""What every compiled forward pass keeps: bits depend on neither threads, chunks nor company."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from packed_steps import Sequence as TokenSequence
from packed_steps import Stepper

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import torch_runner


@contextmanager
def runners_of_8_bits(checkpoint: Checkpoint, slots: int) -> Iterator[list[CpuRunner]]:
    """Runners on one, two and three threads, of weights of 8 bits."""
    runners = [
        CpuRunner.load(checkpoint, slots=slots, threads=threads, weights="q8", kv_cache_dtype="f32")
        for threads in (1, 2, 3)
    ]
    yield runners
    for runner in runners:
        runner.close()


def check_threads_and_chunks(
    runners: Sequence[Runner], tokens: list[int], *divisions: list[int]
) -> None:
    """A prompt has the bits that the first runner gives as a whole, in any division, on each."""
    expected = Stepper(runners[0]).prefill(TokenSequence(list(tokens)))
    for runner in runners:
        for chunks in divisions:
            found = Stepper(runner).prefill(TokenSequence(list(tokens)), chunks)
            np.testing.assert_array_equal(found, expected)


def check_company(alone: Runner, together: Runner, prompts: Sequence[list[int]]) -> None:
    """Prompts, and a decode of each, have the same bits alone and in one step."""
    expected = [Stepper(alone).prefill(TokenSequence(list(each))) for each in prompts]
    stepper = Stepper(together)
    sequences = [TokenSequence(list(each)) for each in prompts]
    found = stepper.step([(each, each.remaining) for each in sequences])
    for logits, cold in zip(found, expected, strict=True):
        np.testing.assert_array_equal(logits, cold)
    for sequence in sequences:
        sequence.tokens.append(5)
    batched = stepper.step([(each, 1) for each in sequences])
    for each, logits in zip(prompts, batched, strict=True):
        cold = Stepper(alone).prefill(TokenSequence([*each, 5]))
        np.testing.assert_array_equal(logits[0], cold[-1])


def check_distance_from_exact(checkpoint: Checkpoint, runner: Runner, tokens: list[int]) -> None:
    """With quantised weights, logits differ from those of exact ones by a few percent."""
    found = Stepper(runner).prefill(TokenSequence(list(tokens)))
    exact = torch_runner(checkpoint, slots=runner.slots)
    expected = Stepper(exact).prefill(TokenSequence(list(tokens)))
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert 0 < np.median(errors) < 0.05


def check_snapshots(alone: Runner, runner: Runner, prompt: Callable[..., list[int]]) -> None:
    """A copy of a state goes on to the bits of a cold prompt, whatever became of the state."""
    stepper, states = Stepper(runner), runner.states
    assert states is not None
    first, snapshot = TokenSequence(prompt(150)), 5
    states.clear(0)
    stepper.prefill(TokenSequence(first.tokens[:90], first.slots, state=0))
    states.copy(0, snapshot)
    stepper.prefill(TokenSequence(prompt(9), state=0))  # goes on, and changes nothing of the copy
    for tokens in (first.tokens, first.tokens[:90] + prompt(40, seed=3)):
        states.copy(snapshot, 1)
        warm = TokenSequence(list(tokens), slots=first.slots[:90], state=1)
        cold = Stepper(alone).prefill(TokenSequence(list(tokens)))
        np.testing.assert_array_equal(stepper.prefill(warm), cold[90:])


def check_layer_by_layer(runner: Runner, tokens: Iterable[int]) -> None:
    """Layer by layer, a prompt and its state have the bits of one pass."""
    sequence = TokenSequence(list(tokens))
    step = Stepper(runner).pack([(sequence, sequence.remaining)])
    whole = np.copy(runner.forward(step))
    assert runner.states is not None
    assert sequence.state is not None
    runner.states.clear(sequence.state)
    hidden = runner.embed(step)
    for layer in range(runner.config.layers):
        hidden = runner.run_layers(step, hidden, layer, layer + 1)
    np.testing.assert_array_equal(runner.compute_logits(step, hidden), whole)
