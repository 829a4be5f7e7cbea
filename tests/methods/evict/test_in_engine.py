"""Every method in the engine, on a tiny model: exact where it keeps all, equal under any load."""

import random
from collections.abc import Iterator

import pytest
from made_methods import small_method, whole_method
from method_load import Alone
from tiny_checkpoints import VOCAB

from midfill.config import KVCacheDtypeName
from midfill.engine.request import EngineSamplingParams
from midfill.methods.registry import methods_of
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answers, build_engine, request, same, serve, torch_runner

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
each_method = pytest.mark.parametrize("name", methods_of("evict"))


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=400, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, VOCAB), k=length))


@pytest.fixture(scope="module")
def alone(runner: CpuRunner) -> Alone:
    return Alone(runner, PARAMS)


@each_method
def test_a_budget_of_everything_gives_the_bits_of_the_whole_kv(
    runner: CpuRunner, name: str
) -> None:
    tokens = prompt(100)
    dense = serve(build_engine(runner), [request("r", tokens, PARAMS)])["r", 0]
    method = whole_method(name, runner.config)
    found = serve(build_engine(runner, method=method), [request("r", tokens, PARAMS)])["r", 0]
    assert same(found, dense)


@each_method
def test_fewer_keys_change_the_answer_but_not_its_first_token(
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
    alone.check_load(
        name, [prompt(length, length) for length in (1, 3, 47, 48, 49, 80, 110)], budget
    )


@each_method
@pytest.mark.parametrize("steps", [5, 13])
def test_preemption_changes_no_bit(alone: Alone, name: str, steps: int) -> None:
    alone.check_preemption(name, [prompt(length, length) for length in (20, 60, 100)], steps)


@each_method
def test_answers_cancelled_at_any_step_leave_no_slot_behind(
    runner: CpuRunner, alone: Alone, name: str
) -> None:
    tokens = prompt(100)
    for step in (0, 2, 6, 7, 23, 24):
        one = build_engine(runner, token_budget=17, method=small_method(name, runner.config))
        pair = EngineSamplingParams(**{**vars_of(PARAMS), "n": 2})
        found = serve(one, [request("r", tokens, pair)], cancellations={step: ("r", 1)})
        assert found["r", 1].finish_reason == "cancelled"
        assert same(found["r", 0], alone(name, tokens))


def vars_of(params: EngineSamplingParams) -> dict[str, object]:
    return {field: getattr(params, field) for field in params.__struct_fields__}


@each_method
def test_both_runners_give_one_answer(llama: Checkpoint, alone: Alone, name: str) -> None:
    tokens = prompt(100)
    one = build_engine(torch_runner(llama, slots=400), method=small_method(name, llama.config))
    found: Answers = serve(one, [request("r", tokens, PARAMS)])
    expected = alone(name, tokens)
    assert found["r", 0].tokens == expected.tokens
    for score, other in zip(found["r", 0].logprobs, expected.logprobs, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-3)


@each_method
@pytest.mark.parametrize("kv_cache_dtype", ["f16", "bf16", "i8"])
def test_rounded_keys_are_compressed_too(
    llama: Checkpoint, alone: Alone, name: str, kv_cache_dtype: KVCacheDtypeName
) -> None:
    runner = CpuRunner.load(
        llama, slots=400, threads=1, weights="f32", kv_cache_dtype=kv_cache_dtype
    )
    one = build_engine(runner, method=small_method(name, runner.config))
    found = serve(one, [request("r", prompt(100), PARAMS)])["r", 0]
    exact = alone(name, prompt(100))
    difference = abs(found.logprobs[1].logprob - exact.logprobs[1].logprob)
    assert difference < {"f16": 0.02, "bf16": 0.2, "i8": 0.5}[kv_cache_dtype]
    runner.close()
