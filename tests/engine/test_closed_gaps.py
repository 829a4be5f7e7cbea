"""Keys that move together: positions within the cache, and what the rotation must not change."""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_keys import fake_keys
from serving import Answer, build_engine, request, serve
from tiny_checkpoints import VOCAB, write_variant

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.checkpoints.opening import open_checkpoint
from midfill.compression.method import SequenceKeys
from midfill.compression.method_defaults import MethodDefaults
from midfill.compression.selection import Selection
from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.forward.batch import ForwardBatch
from midfill.methods.evict.lacache import LaCache
from midfill.methods.evict.streaming_llm import StreamingLLM
from midfill.models.config import ModelConfig
from midfill.runners.cpu_runner import CpuRunner

BUDGET = 40
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=0)
PROMPT = random.Random(0).choices(range(1, VOCAB), k=100)


class RecordingRunner(CpuRunner):
    """Notes the positions of all rows."""

    def __init__(self, checkpoint: Checkpoint, **options: Any) -> None:
        self.positions: list[int] = []
        super().__init__(checkpoint, **options)

    def forward(self, batch: ForwardBatch):  # type: ignore[no-untyped-def]
        self.positions += batch.positions.tolist()
        return super().forward(batch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_variant("llama", tmp_path / "llama"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingRunner]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))
    runner = RecordingRunner(checkpoint, slots=300, threads=1, weights="f32", kv_dtype="f32")
    yield runner
    runner.close()


@dataclass(frozen=True)
class LastTokens(MethodDefaults):
    """Keeps the last tokens, which move together or stay where they are."""

    close_gaps: bool
    interval: int = 1

    def start(self, config: ModelConfig) -> "LastTokens":
        return self

    def fork(self) -> "LastTokens":
        return self

    def observe(self, keys: SequenceKeys, queries: np.ndarray) -> None:
        raise NotImplementedError

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection | None:
        count = int(keys.counts[0])
        if count <= BUDGET:
            return None
        kept = Selection.of_tokens(np.arange(count - BUDGET, count, dtype=np.int32), keys.heads)
        return dataclasses.replace(kept, close_gaps=self.close_gaps)


def answer(runner: RecordingRunner, method: LastTokens) -> Answer:
    runner.positions = []
    return serve(build_engine(runner, method=method), [request("r", PROMPT, PARAMS)])["r", 0]


@pytest.mark.parametrize("interval", [1, 7])
def test_distances_alone_matter(runner: RecordingRunner, interval: int) -> None:
    """Keys and queries that all move by the same distance give the same answer."""
    moved = answer(runner, LastTokens(True, interval))
    positions = runner.positions[len(PROMPT) :]
    assert max(positions) <= BUDGET + interval - 1
    assert len(positions) == PARAMS.max_tokens - 1
    stayed = answer(runner, LastTokens(False, interval))
    assert runner.positions[-1] == len(PROMPT) + PARAMS.max_tokens - 2
    assert moved.tokens == stayed.tokens
    for one, other in zip(moved.logprobs, stayed.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_keys_are_those_of_their_places_however_often_they_have_moved(
    runner: RecordingRunner,
) -> None:
    """The first layer's keys depend on token and position alone. Here tokens go every step, others
    in each layer, and the answer is several times as long as the cache."""
    ladder = LaCache(budget=BUDGET, span=1, interval=1)
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
    serve(build_engine(runner, method=ladder), [request("r", PROMPT, long)], after_step=look)
    # Which tokens the first layer keeps in the end.
    state = ladder.start(runner.config)
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
    ends = np.array([0, len(numbers)], np.int32)
    kept = np.array(tokens, np.int32)[numbers]
    runner.forward(ForwardBatch(kept, slots, slots, ends, ends, slots, slots[-1:]))
    expected, _ = runner.cells.read(slots)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("method", [LaCache(budget=BUDGET), StreamingLLM(budget=BUDGET)])
def test_long_answers_hold_no_more_and_get_no_further_than_the_cache(
    checkpoint: Checkpoint, method: LaCache | StreamingLLM
) -> None:
    """An answer of fifty times the cache's size."""
    checkpoint.config = dataclasses.replace(checkpoint.config, context=4096)
    runner = RecordingRunner(checkpoint, slots=2200, threads=1, weights="f32", kv_dtype="f16")
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
    assert max(runner.positions[len(PROMPT) :]) < BUDGET + 2 + method.interval
    runner.close()


def test_gaps_can_be_closed_only_where_heads_keep_equally_many() -> None:
    keys, _ = fake_keys(10)
    kept = [np.arange(3 + head % 2) for head in range(keys.heads)]
    uneven = dataclasses.replace(Selection.of_heads(kept), close_gaps=True)
    with pytest.raises(ValueError, match="equally many"):
        uneven.check(keys.counts)
