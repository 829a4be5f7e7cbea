"""Every method that quantises in the engine, on a tiny model: exact where it quantises nothing,
equal under any load, and with less memory."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from made_methods import make_method, small_method, whole_method
from method_load import Alone
from tiny_checkpoints import VOCAB

from midfill.config import KVCacheDtypeName
from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.method import ModelSpecific
from midfill.methods.registry import methods_of, resolve_method
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import build_engine, request, same, serve, torch_runner

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
PAIR = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0, n=2)
each_method = pytest.mark.parametrize("name", methods_of("quantize"))


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=400, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def alone(runner: CpuRunner) -> Alone:
    return Alone(runner, PARAMS)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, VOCAB), k=length))


@each_method
def test_nothing_quantised_gives_the_bits_of_the_whole_kv(runner: CpuRunner, name: str) -> None:
    tokens = prompt(100)
    dense = serve(build_engine(runner), [request("r", tokens, PARAMS)])["r", 0]
    method = whole_method(name, runner.config)
    found = serve(build_engine(runner, method=method), [request("r", tokens, PARAMS)])["r", 0]
    assert same(found, dense)


@each_method
def test_fewer_bits_change_the_answer_but_not_its_first_token(
    runner: CpuRunner, alone: Alone, name: str
) -> None:
    tokens = prompt(100)
    dense = serve(build_engine(runner), [request("r", tokens, PARAMS)])["r", 0]
    found = alone(name, tokens)
    assert found.logprobs[0] == dense.logprobs[0]
    assert found.logprobs[1:] != dense.logprobs[1:]


@each_method
@pytest.mark.parametrize("budget", [7, 64])
def test_load_changes_no_bit(alone: Alone, name: str, budget: int) -> None:
    prompts = [prompt(length, length) for length in (1, 3, 47, 49, 80, 110)]
    alone.check_load(name, prompts, budget)


@each_method
def test_preemption_changes_no_bit(alone: Alone, name: str) -> None:
    alone.check_preemption(name, [prompt(length, length) for length in (20, 60, 100)], 13)


@each_method
def test_answers_cancelled_at_any_step_leave_no_slot_behind(
    runner: CpuRunner, alone: Alone, name: str
) -> None:
    tokens = prompt(100)
    for step in (0, 6, 7, 23):
        engine = build_engine(runner, token_budget=17, method=small_method(name, runner.config))
        asked = [request("r", tokens, PAIR)]
        found = serve(engine, asked, cancellations={step: ("r", 1)})
        assert found["r", 1].finish_reason == "cancelled"
        assert same(found["r", 0], alone(name, tokens))
        stats = engine.stats()
        assert stats.slots_free + stats.slots_cached == stats.slots_total


@each_method
def test_every_token_is_held_once_in_every_head(runner: CpuRunner, name: str) -> None:
    """Exact or in a block, after every decision."""
    decided = set()

    def look(engine: Engine) -> None:
        for sequence in engine._queues.running:
            if sequence.kv is not None and (prefix := sequence.kv.prefix) is not None:
                decided.add(prefix.tokens)
                assert prefix.index.quantized is not None
                held = np.diff(prefix.index.indptr) + prefix.index.quantized.counts
                assert held.tolist() == [prefix.tokens] * len(held)

    method = small_method(name, runner.config)
    serve(build_engine(runner, method=method), [request("r", prompt(100), PARAMS)], after_step=look)
    assert len(decided) > 2


@each_method
def test_both_runners_give_one_answer(llama: Checkpoint, alone: Alone, name: str) -> None:
    tokens = prompt(100)
    method = small_method(name, llama.config)
    engine = build_engine(torch_runner(llama, slots=400), method=method)
    found = serve(engine, [request("r", tokens, PARAMS)])["r", 0]
    expected = alone(name, tokens)
    assert found.tokens == expected.tokens
    for score, other in zip(found.logprobs, expected.logprobs, strict=True):
        # What runners round otherwise may be another code, and what an outlier adds to it.
        assert score.logprob == pytest.approx(other.logprob, abs=0.02)


@each_method
@pytest.mark.parametrize("kv_cache_dtype", ["f16", "bf16"])
def test_rounded_keys_are_quantised_too(
    llama: Checkpoint, alone: Alone, name: str, kv_cache_dtype: KVCacheDtypeName
) -> None:
    runner = CpuRunner.load(
        llama, slots=400, threads=1, weights="f32", kv_cache_dtype=kv_cache_dtype
    )
    one = build_engine(runner, method=small_method(name, runner.config))
    found = serve(one, [request("r", prompt(100), PARAMS)])["r", 0]
    exact = alone(name, prompt(100))
    difference = abs(found.logprobs[1].logprob - exact.logprobs[1].logprob)
    assert difference < {"f16": 0.05, "bf16": 0.3}[kv_cache_dtype]
    runner.close()


@pytest.mark.parametrize(
    "specification",
    ["mikv:ratio=0,low=8", "mikv:ratio=0.3,high=8,low=4", "mikv:low=3", "gear:bits=4,rank=16"],
)
def test_heads_without_exact_keys_and_blocks_of_all_widths_are_attended_to(
    llama: Checkpoint, specification: str
) -> None:
    """Both runners give one answer, which holds fewer slots than its 100 tokens and more."""
    options = "buffer=16" if specification.startswith("gear") else "interval=16"
    method = make_method(f"{specification},{options}", llama.config)
    fewest = []

    def look(engine: Engine) -> None:
        stats = engine.stats()
        fewest.append(stats.slots_total - stats.slots_free - stats.slots_cached)

    cpu = CpuRunner.load(llama, slots=400, threads=1, weights="f32", kv_cache_dtype="f32")
    asked = [request("r", prompt(100), PARAMS)]
    found = serve(build_engine(cpu, method=method), asked, after_step=look)["r", 0]
    cpu.close()
    other = serve(build_engine(torch_runner(llama, slots=400), method=method), asked)["r", 0]
    assert found.tokens == other.tokens
    for score, same_score in zip(found.logprobs, other.logprobs, strict=True):
        assert score.logprob == pytest.approx(same_score.logprob, abs=0.05)
    assert 0 < min(held for held in fewest if held) < 60


@each_method
@pytest.mark.parametrize(
    ("window", "kv_cache_dtype", "message"),
    [
        (64, "f16", "needs a model whose layers see the whole text; layers of this one see 64"),
        (None, "i8", "needs a KV cache of f16, bf16 or f32, not i8 (--kv-cache-dtype)"),
        (None, "i4", "needs a KV cache of f16, bf16 or f32, not i4 (--kv-cache-dtype)"),
    ],
)
def test_models_whose_keys_cannot_be_quantised_are_refused_in_one_line(
    llama: Checkpoint, name: str, window: int | None, kv_cache_dtype: str, message: str
) -> None:
    config = replace(llama.config, sliding_window=window)
    method = resolve_method(name)
    assert isinstance(method, ModelSpecific)
    with pytest.raises(InvalidRequestError) as refused:
        method.for_model(ServedModel(config=config, kv_cache_dtype=kv_cache_dtype))
    assert str(refused.value).startswith(name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
