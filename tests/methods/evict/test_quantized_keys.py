"""Keys that go on as quantised blocks, in the engine: what they cost, and that nothing moves them
but their cells."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from fake_keys import fake_keys
from tiny_checkpoints import VOCAB
from toy_method import RoundOlder

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.kv.quantized import QuantizedBlock
from midfill.methods.evict.selection import Selection
from midfill.methods.quantize.quantizers import quantize_channels, quantize_tokens
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import build_engine, request, same, serve, torch_runner

PROMPT = random.Random(0).choices(range(1, VOCAB), k=200)
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=500, threads=2, weights="f32", kv_cache_dtype="f16")
    yield runner
    runner.close()


def test_a_sequence_owns_the_slots_that_its_bytes_fill(runner: CpuRunner) -> None:
    heads, dim = runner.config.layers * runner.config.kv_heads, runner.config.head_dim
    cell = 4 * dim  # K and V in float16
    held: list[int] = []

    def look(engine: Engine) -> None:
        for sequence in engine._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                held.append(sequence.kv.owned - sequence.kv.reserved)

    serve(
        build_engine(runner, method=RoundOlder(20, bits=2)),
        [request("r", PROMPT, PARAMS)],
        after_step=look,
    )
    # Of 200 keys 20 are exact, and one more in every other head.
    quantized = [180 - head % 2 for head in range(heads)]
    codes = [2 * count * dim * 2 // 8 for count in quantized]
    terms = [2 * 2 * dim + 2 * 2 * count for count in quantized]
    cells = [-(-sum(block) // cell) for block in zip(codes, terms, strict=True)]
    exact = [200 - count for count in quantized]
    assert set(held) == {-(-(sum(cells) + sum(exact)) // heads)}


def test_blocks_stay_as_they_are_while_the_answer_grows(runner: CpuRunner) -> None:
    seen: dict[tuple[int, int], np.ndarray] = {}
    most = 0

    def look(engine: Engine) -> None:
        nonlocal most
        for sequence in engine._queues.running:
            index = None if sequence.kv is None or not sequence.kv.prefix else sequence.kv.prefix
            if index is None or index.index.quantized is None:
                continue
            blocks = index.index.quantized
            for head in range(len(blocks.indptr) - 1):
                most = max(most, len(blocks.numbers(head)))
                for place, number in enumerate(blocks.numbers(head)):
                    data = np.stack(runner.cells.dump(blocks.cells_of(number)))
                    known = seen.setdefault((head, place), data)
                    assert np.array_equal(known, data)

    serve(
        build_engine(runner, method=RoundOlder(20, interval=5, bits=3)),
        [request("r", PROMPT, PARAMS)],
        after_step=look,
    )
    assert most > 4


@pytest.mark.parametrize("bits", [2, 8])
def test_fewer_bits_are_further_from_the_exact_answer(runner: CpuRunner, bits: int) -> None:
    dense = serve(build_engine(runner), [request("r", PROMPT, PARAMS)])["r", 0]
    method = RoundOlder(20, interval=8, bits=bits)
    found = serve(build_engine(runner, method=method), [request("r", PROMPT, PARAMS)])["r", 0]
    assert found.logprobs[0] == dense.logprobs[0]
    difference = abs(found.logprobs[1].logprob - dense.logprobs[1].logprob)
    assert (difference > 0.02) if bits == 2 else (0 < difference < 0.02)


def test_threads_batches_and_chunks_change_no_bit(llama: Checkpoint, runner: CpuRunner) -> None:
    method = RoundOlder(20, interval=8, bits=4)
    expected = serve(build_engine(runner, method=method), [request("r", PROMPT, PARAMS)])["r", 0]
    other = CpuRunner.load(llama, slots=500, threads=1, weights="f32", kv_cache_dtype="f16")
    requests = [request(name, PROMPT[start:], PARAMS) for name, start in (("r", 0), ("s", 70))]
    found = serve(build_engine(other, method=method, token_budget=50), requests)["r", 0]
    assert same(found, expected)
    other.close()


def test_both_runners_give_one_answer(llama: Checkpoint) -> None:
    answers = []
    for runner in (
        CpuRunner.load(llama, slots=500, threads=2, weights="f32", kv_cache_dtype="f32"),
        torch_runner(llama, slots=500),
    ):
        engine = build_engine(runner, method=RoundOlder(20, interval=8))
        answers.append(serve(engine, [request("r", PROMPT, PARAMS)])["r", 0])
    assert answers[0].tokens == answers[1].tokens
    for score, other in zip(answers[0].logprobs, answers[1].logprobs, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_a_selection_with_blocks_is_checked() -> None:
    keys, _ = fake_keys(10)
    found = keys.read(0, np.arange(10, dtype=np.int32))
    block = QuantizedBlock.of(quantize_channels(found[0], 4), quantize_tokens(found[1], 4))
    nothing = [np.zeros(0, np.int32)] * keys.heads
    Selection.of_heads(nothing, quantized=[[block]] * keys.heads).check(keys.counts)
    with pytest.raises(ValueError, match="blocks of every layer and head"):
        Selection.of_heads(nothing, quantized=[[block]]).check(keys.counts)
    with pytest.raises(ValueError, match="at least one key"):
        Selection.of_heads(nothing, quantized=[[]] * keys.heads).check(keys.counts)
