"""Keys that move together, and what their rotation must not change."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from fake_keys import fake_keys
from tiny_checkpoints import VOCAB, write_variant

from midfill.arrays import RunnerArray
from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.evict.h2o import H2O
from midfill.methods.evict.lacache import LaCache
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.streaming_llm import StreamingLLM
from midfill.methods.method import Method
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from serving import Answer, FixedCost, build_engine, request, same, serve

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


@pytest.mark.parametrize(
    "method",
    [
        LaCache(budget=BUDGET, span=1, interval=1),
        LaCache(budget=BUDGET, interval=7),
        StreamingLLM(budget=BUDGET, interval=1),
        StreamingLLM(budget=BUDGET, interval=16),
    ],
)
@pytest.mark.parametrize("cost", [None, FixedCost(0.0)], ids=["plain", "drafts"])
def test_answers_that_outgrow_the_context_are_those_of_a_longer_one(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    method: LaCache | StreamingLLM,
    cost: FixedCost | None,
) -> None:
    """Only distances between keys count, so where they stand makes no difference: a model of 256
    positions answers like one of 4,096, and its answer is three times as long as those go.
    """
    long = EngineSamplingParams(temperature=0.0, max_tokens=700, ignore_eos=True, logprobs=0)
    found: list[Answer] = []
    for context in (256, 4096):
        checkpoint.config = dataclasses.replace(checkpoint.config, context=context)
        runner = CpuRunner.load(
            checkpoint, slots=900, threads=1, weights="f32", kv_cache_dtype="f32"
        )
        last = list[int]()
        monkeypatch.setattr(runner, "forward", _noting(runner.forward, last))
        engine = build_engine(runner, method=method, step_cost=cost)
        found.append(serve(engine, [request("r", PROMPT, long)])["r", 0])
        assert max(last) < context
        runner.close()
    short, other = found
    assert (len(short.tokens), short.finish_reason) == (700, "length")
    assert short.tokens == other.tokens
    np.testing.assert_allclose(
        [each.logprob for each in short.logprobs],
        [each.logprob for each in other.logprobs],
        atol=1e-3,
    )


def _noting(
    forward: Callable[[ForwardBatch], RunnerArray], last: list[int]
) -> Callable[[ForwardBatch], RunnerArray]:
    """Return a runner's ``forward`` that adds each batch's last position to a list."""

    def note(batch: ForwardBatch) -> RunnerArray:
        last.append(int(batch.positions.max()))
        return forward(batch)

    return note


@pytest.mark.parametrize("step", [180, 420])
@pytest.mark.parametrize("method", [LaCache(budget=BUDGET), StreamingLLM(budget=BUDGET)])
def test_an_answer_that_is_preempted_beyond_the_context_goes_on_to_the_same_bits(
    checkpoint: Checkpoint, method: LaCache | StreamingLLM, step: int
) -> None:
    checkpoint.config = dataclasses.replace(checkpoint.config, context=256)
    runner = CpuRunner.load(checkpoint, slots=900, threads=1, weights="f32", kv_cache_dtype="f32")
    long = EngineSamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True, logprobs=0)
    steps = count()

    def preempt(one: Engine) -> None:
        if next(steps) == step:
            one._execution.preempt(one._queues.running[0])

    answers = [
        serve(build_engine(runner, method=method), [request("r", PROMPT, long)], after_step=after)
        for after in (None, preempt)
    ]
    assert next(steps) > step
    assert same(answers[1]["r", 0], answers[0]["r", 0])
    runner.close()


@pytest.mark.parametrize(
    "method",
    [
        StreamingLLM(budget=BUDGET, interval=0),
        StreamingLLM(budget=120, interval=16),
        H2O(budget=BUDGET),
    ],
    ids=["never again", "too large", "keys stay where they are"],
)
def test_other_answers_end_at_the_context(checkpoint: Checkpoint, method: Method) -> None:
    checkpoint.config = dataclasses.replace(checkpoint.config, context=256)
    runner = CpuRunner.load(checkpoint, slots=900, threads=1, weights="f32", kv_cache_dtype="f32")
    long = EngineSamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
    found = serve(build_engine(runner, method=method), [request("r", PROMPT, long)])["r", 0]
    assert (len(found.tokens), found.finish_reason) == (256 - len(PROMPT), "length")
    with pytest.raises(InvalidRequestError, match="at most 256 fit"):
        build_engine(runner, method=StreamingLLM(budget=BUDGET)).add(request("r", [1] * 256, long))
    runner.close()
