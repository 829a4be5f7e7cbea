"""Every method of sparse prefill in the engine: exact where it lists all, equal under any load."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from made_methods import STREAMING_PREFILL, small_method, whole_method
from method_load import Alone
from tiny_checkpoints import VOCAB

from midfill.engine.request import EngineSamplingParams
from midfill.methods.registry import methods_of
from midfill.methods.sparse_prefill.method import PrefillMethod
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answer, build_engine, request, same, serve, torch_runner

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
THREE = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, n=3)
each_method = pytest.mark.parametrize("name", [*methods_of("prefill"), STREAMING_PREFILL])


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=1400, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCAB, length).tolist())


@pytest.fixture(scope="module")
def alone(runner: CpuRunner) -> Alone:
    return Alone(runner, PARAMS)


@pytest.fixture(scope="module")
def dense(runner: CpuRunner) -> Callable[[tuple[int, ...]], Answer]:
    @cache
    def answer(tokens: tuple[int, ...]) -> Answer:
        return serve(build_engine(runner), [request("r", tokens, PARAMS)])["r", 0]

    return answer


@each_method
def test_lists_of_all_keys_give_the_bits_of_dense_attention(
    runner: CpuRunner, dense: Callable[[tuple[int, ...]], Answer], name: str
) -> None:
    one = build_engine(runner, method=whole_method(name, runner.config))
    found = serve(one, [request("r", prompt(300), PARAMS)])["r", 0]
    assert same(found, dense(prompt(300)))
    assert one.stats().listed_pairs >= one.stats().causal_pairs > 0


@each_method
def test_some_keys_change_answers_and_cost_less(
    runner: CpuRunner, dense: Callable[[tuple[int, ...]], Answer], name: str
) -> None:
    method = small_method(name, runner.config)
    assert isinstance(method, PrefillMethod)
    one = build_engine(runner, method=method)
    found = serve(one, [request("r", prompt(400), PARAMS)])["r", 0]
    assert found.logprobs[0] != dense(prompt(400)).logprobs[0]
    stats = one.stats()
    assert 0 < stats.listed_pairs < 0.9 * stats.causal_pairs
    chunks = [(start, min(64, 400 - start)) for start in range(0, 400, 64)]
    listed = [(start, rows) for start, rows in chunks if not method.is_dense(start, rows)]
    causal = sum(rows * start + rows * (rows + 1) // 2 for start, rows in listed)
    assert stats.causal_pairs == causal * runner.config.layers * runner.config.query_heads
    short = serve(one, [request("s", prompt(60), PARAMS)])["s", 0]
    assert same(short, dense(prompt(60)))


@each_method
@pytest.mark.parametrize("budget", [7, 100])
def test_load_changes_no_bit(alone: Alone, name: str, budget: int) -> None:
    alone.check_load(name, [prompt(length, length) for length in (1, 63, 64, 65, 200, 330)], budget)


@each_method
@pytest.mark.parametrize("steps", [3, 7])
def test_preemption_changes_no_bit(alone: Alone, name: str, steps: int) -> None:
    alone.check_preemption(name, [prompt(length, length) for length in (90, 200, 330)], steps)


@each_method
def test_a_request_for_several_answers_gives_each_as_if_alone(
    runner: CpuRunner, alone: Alone, name: str
) -> None:
    for step in (None, 1, 4, 9):
        one = build_engine(runner, token_budget=100, method=small_method(name, runner.config))
        cancelled = {} if step is None else {step: ("r", 1)}
        found = serve(one, [request("r", prompt(200), THREE)], cancellations=cancelled)
        for index in (0, 2) if cancelled else (0, 1, 2):
            assert same(found["r", index], alone(name, prompt(200)))


@each_method
def test_whole_chunks_are_shared_among_prompts_under_the_method_only(
    runner: CpuRunner, alone: Alone, dense: Callable[[tuple[int, ...]], Answer], name: str
) -> None:
    method = small_method(name, runner.config)
    one = build_engine(runner, methods={"sparse": method, "none": None})
    begun, other = prompt(330), (*prompt(330)[:200], *prompt(60, 5))
    expected = alone(name, begun), alone(name, other), dense(other)  # they use the same KV cache

    def ask(tokens: tuple[int, ...], method: str, tenant: str = "") -> Answer:
        wanted = request("r", tokens, PARAMS, tenant=tenant, method=method)
        return serve(one, [wanted])["r", 0]

    first = ask(begun, "sparse")
    assert (first.cached_tokens, same(first, expected[0])) == (0, True)
    changed = ask(other, "sparse")
    assert (changed.cached_tokens, same(changed, expected[1])) == (192, True)
    exact = ask(other, "none")
    assert (exact.cached_tokens, same(exact, expected[2])) == (0, True)
    again = ask(begun, "sparse")
    assert (again.cached_tokens, same(again, expected[0])) == (320, True)
    assert ask(begun, "sparse", tenant="another").cached_tokens == 0


@each_method
def test_prompts_of_which_nothing_is_listed_share_the_exact_cache(
    runner: CpuRunner, name: str
) -> None:
    method = small_method(name, runner.config)
    one = build_engine(runner, methods={"sparse": method, "none": None})
    for asked, cached in (("sparse", 0), ("none", 59), ("sparse", 59)):
        found = serve(one, [request("r", prompt(60), PARAMS, method=asked)])["r", 0]
        assert found.cached_tokens == cached


@each_method
def test_scored_prompts_and_later_questions(runner: CpuRunner, name: str) -> None:
    method = small_method(name, runner.config)
    scored = EngineSamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    whole = request("r", prompt(300), scored, compress_after=200, score_from=250)
    results = []
    for budget in (9, 512):
        outputs = []
        one = build_engine(runner, token_budget=budget, method=method)
        one.add(whole)
        while one.has_work():
            outputs += one.step()
        results.append([score.logprob for score in outputs[0].prompt_logprobs or []])
        assert one.stats().listed_pairs > 0
    assert len(results[0]) == 50
    assert results[0] == results[1]


@each_method
def test_both_runners_give_one_answer(llama: Checkpoint, alone: Alone, name: str) -> None:
    tokens = prompt(330)
    one = build_engine(torch_runner(llama, slots=400), method=small_method(name, llama.config))
    found = serve(one, [request("r", tokens, PARAMS)])["r", 0]
    expected = alone(name, tokens)
    assert found.tokens == expected.tokens
    for score, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-3)
