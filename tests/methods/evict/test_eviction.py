"""Keys that move together, and what their rotation must not change."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_keys import fake_keys
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.methods.evict.lacache import LaCache
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.streaming_llm import StreamingLLM
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from serving import build_engine, request, serve

BUDGET = 40
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=0)
PROMPT = random.Random(0).choices(range(1, VOCAB), k=100)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_variant("llama", tmp_path / "llama"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))
    runner = CpuRunner.load(checkpoint, slots=300, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "method",
    [
        LaCache(budget=BUDGET, span=1, interval=1),
        StreamingLLM(budget=BUDGET, interval=1),
    ],
)
def test_keys_are_those_of_their_places_however_often_they_have_moved(
    runner: CpuRunner, method: LaCache | StreamingLLM
) -> None:
    """The first layer's keys depend on token and position alone. Here tokens go every step, others
    in each layer, and the answer is several times as long as the cache."""
    tokens = list[int]()
    numbers = np.arange(len(PROMPT))
    found = np.zeros(0, np.float32)

    def look(one: Engine) -> None:
        nonlocal found
        for sequence in one._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                index = sequence.kv.prefix.index
                found, _ = runner.cells.read(index.cells[: index.indptr[1]])
                tokens[:] = sequence.tokens.tolist()
                assert sequence.kv.owned <= BUDGET + 1, "an answer holds no more than the budget"

    long = EngineSamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    serve(build_engine(runner, method=method), [request("r", PROMPT, long)], after_step=look)
    # Which tokens the first layer keeps in the end.
    state = method.start(runner.config)
    while True:
        cells = [np.arange(len(numbers), dtype=np.int32)] * (
            runner.config.layers * runner.config.kv_heads
        )
        keys = SequenceKeys(runner.config, cells, runner.cells)
        selection = state.select(keys, np.zeros((0, 0, 0, 0), np.float32))
        if selection is not None:
            numbers = numbers[selection.kept[: selection.indptr[1]]]
        if numbers[-1] == len(tokens) - 2:
            break
        numbers = np.append(numbers, numbers[-1] + 1)
    slots = np.arange(len(numbers), dtype=np.int32)
    # The last keeps its position, and the others lie before it, side by side.
    positions = slots + np.int32(len(tokens) - 1 - len(numbers))
    ends = np.array([0, len(numbers)], np.int32)
    kept = np.array(tokens, np.int32)[numbers]
    runner.forward(ForwardBatch(kept, positions, slots, ends, ends, slots, slots[-1:]))
    expected, _ = runner.cells.read(slots)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("method", [LaCache(budget=BUDGET), StreamingLLM(budget=BUDGET)])
def test_long_answers_hold_no_more_than_the_cache(
    checkpoint: Checkpoint, method: LaCache | StreamingLLM
) -> None:
    """An answer of fifty times the cache's size."""
    checkpoint.config = dataclasses.replace(checkpoint.config, context=4096)
    runner = CpuRunner.load(checkpoint, slots=2200, threads=1, weights="f32", kv_cache_dtype="f16")
    held: list[int] = []

    def look(one: Engine) -> None:
        stats = one.stats()
        held.append(stats.slots_total - stats.slots_free - stats.slots_cached)

    long = EngineSamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    found = serve(
        build_engine(runner, method=method), [request("r", PROMPT, long)], after_step=look
    )
    assert len(found["r", 0].tokens) == 2000
    assert max(held) < BUDGET + 2 + method.interval
    runner.close()


def test_gaps_can_be_closed_only_where_heads_keep_equally_many() -> None:
    keys, _ = fake_keys(10)
    kept = [np.arange(3 + head % 2) for head in range(keys.heads)]
    uneven = dataclasses.replace(Selection.of_heads(kept), close_gaps=True)
    with pytest.raises(ValueError, match="equally many"):
        uneven.check(keys.counts)
