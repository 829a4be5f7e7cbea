"""Methods that quantise, in the engine: what blocks stand for is attended to, and frees slots."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from made_methods import small_method
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.methods.evict.method import (
    CompressionMethod,
    RecallingMethod,
    SequenceCompressor,
    SequenceKeys,
)
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.registry import methods_of
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from serving import build_engine, request, same, serve

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPT = tuple(random.Random(0).choices(range(1, VOCAB), k=300))
each_method = pytest.mark.parametrize("name", methods_of("quantize"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))
    runner = CpuRunner.load(checkpoint, slots=1200, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def small(name: str, config: ModelConfig) -> CompressionMethod:
    method = small_method(name, config)
    assert isinstance(method, CompressionMethod)
    return method


@dataclass(frozen=True)
class Decoded:
    """A method whose blocks become exact keys, those that they stand for; it decides once."""

    method: CompressionMethod
    config: ModelConfig
    interval: int = 0

    @property
    def observed_rows(self) -> int:
        return self.method.observed_rows

    @property
    def block_rows(self) -> int:
        return self.method.block_rows

    def start(self, config: ModelConfig) -> "DecodedKeys":
        return DecodedKeys(self.method.start(config))

    def recall(self, tokens: np.ndarray, tenant: str) -> tuple[int, SequenceCompressor]:
        if not isinstance(self.method, RecallingMethod):
            return 0, self.start(self.config)
        known, compressor = self.method.recall(tokens, tenant)
        return known, DecodedKeys(compressor)


class DecodedKeys:
    def __init__(self, compressor: SequenceCompressor) -> None:
        self._compressor = compressor

    def fork(self) -> "DecodedKeys":
        return DecodedKeys(self._compressor.fork())

    def observe(self, keys: SequenceKeys, queries: np.ndarray) -> None:
        self._compressor.observe(keys, queries)

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection | None:
        selection = self._compressor.select(keys, queries)
        assert selection is not None
        assert selection.quantized is not None
        dim, counts = keys.config.head_dim, [0]
        found = [(np.zeros((0, dim), np.float32),) * 2]
        for blocks in selection.quantized:
            found += [block.decode(dim) for block in blocks]
            counts.append(counts[-1] + sum(block.tokens for block in blocks))
        decoded = [np.concatenate(part) for part in zip(*found, strict=True)]
        added = AddedKeys(decoded[0], decoded[1], np.array(counts, np.int32))
        return Selection(selection.kept, selection.indptr, added=added)


@each_method
def test_blocks_are_attended_to_as_what_they_stand_for(runner: CpuRunner, name: str) -> None:
    method = small(name, runner.config)
    found, expected = (
        serve(build_engine(runner, method=each), [request("r", PROMPT, PARAMS)])["r", 0]
        for each in (method, Decoded(method, runner.config))
    )
    assert found.tokens == expected.tokens
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@each_method
def test_slots_that_blocks_free_are_free_for_others(runner: CpuRunner, name: str) -> None:
    """What is held is what blocks and exact keys fill, packed over all layers and heads."""
    held = []

    def look(one: Engine) -> None:
        [sequence] = one._queues.running or [None]
        if sequence is None or sequence.kv is None or sequence.kv.prefix is None:
            return
        index, kv = sequence.kv.prefix.index, sequence.kv
        assert index.quantized is not None
        filled = len(index.cells) + len(index.quantized.cells)
        heads = runner.config.layers * runner.config.kv_heads
        stats = one.stats()
        used = stats.slots_total - stats.slots_free - stats.slots_cached
        assert used == -(-filled // heads) + len(kv.slots)
        held.append(used)

    method = small(name, runner.config)
    serve(build_engine(runner, method=method), [request("r", PROMPT, PARAMS)], after_step=look)
    assert held
    assert max(held) < 0.75 * len(PROMPT)


@each_method
def test_the_prompt_stays_cached_exactly_and_is_quantised_alike(
    runner: CpuRunner, name: str
) -> None:
    engine = build_engine(runner, method=small(name, runner.config), token_budget=70)
    asked = [request("r", PROMPT, PARAMS)]
    first, again = (serve(engine, asked)["r", 0] for _ in range(2))
    assert again.cached_tokens > 0.75 * len(PROMPT)
    assert same(first, again)
