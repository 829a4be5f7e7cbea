"""Equal requests at the same time: one computes the prompt, the others wait for its KV."""

from pathlib import Path

import pytest
from tiny_checkpoints import VOCAB as TINY_VOCAB
from tiny_checkpoints import write_tiny
from toy_engine import engine, prompt, sampling, truth

from midfill.engine.engine import Engine
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answers, build_engine, request, serve

TOKENS = prompt(70)


def computed(one: Engine, *names: str, tokens: list[int] = TOKENS) -> tuple[int, Answers]:
    """Return the rows of some equal requests that arrive together, and their answers."""
    before = one.stats().computed_tokens
    answers = serve(one, [request(name, tokens) for name in names])
    return one.stats().computed_tokens - before, answers


@pytest.mark.parametrize("budget", [8, 32, 64, 512])
def test_their_prompt_is_computed_once(budget: int) -> None:
    rows, answers = computed(engine(token_budget=budget), "a", "b", "c")
    # The prompt, its last token for the other two, and eleven decodes each.
    assert rows == 70 + 2 + 3 * 11
    assert all(answer.tokens == truth(TOKENS) for answer in answers.values())
    assert sorted(answer.cached_tokens for answer in answers.values()) == [0, 69, 69]


def test_what_was_typed_is_computed_once() -> None:
    one = engine()
    computed(one, "before", tokens=TOKENS[:60])
    rows, answers = computed(one, "a", "b", "c")
    assert rows == 10 + 2 + 3 * 11
    assert all(answer.tokens == truth(TOKENS) for answer in answers.values())


def test_a_few_tokens_are_not_worth_a_step() -> None:
    one = engine()
    computed(one, "before", tokens=TOKENS[:68])
    rows, _ = computed(one, "a", "b")
    assert rows == 2 * 2 + 2 * 11


def test_sampled_differently_each_answer_is_as_alone() -> None:
    seeds = [sampling(temperature=1.2, seed=seed) for seed in range(3)]
    alone = [serve(engine(), [request("a", TOKENS, each)])["a", 0].tokens for each in seeds]
    together = serve(engine(), [request(f"{i}", TOKENS, each) for i, each in enumerate(seeds)])
    assert [together[f"{i}", 0].tokens for i in range(3)] == alone


def test_arriving_while_the_first_is_prefilled() -> None:
    one = engine(token_budget=16)
    arrivals = {0: [request("a", TOKENS)], 1: [request("b", TOKENS)], 3: [request("c", TOKENS)]}
    answers = serve(one, arrivals=arrivals)
    assert one.stats().computed_tokens == 70 + 2 + 3 * 11
    assert all(answer.tokens == truth(TOKENS) for answer in answers.values())


@pytest.mark.parametrize("step", [1, 2, 3])
def test_when_the_first_is_cancelled_the_next_continues_where_it_was(step: int) -> None:
    one = engine(token_budget=16)
    requests = [request(name, TOKENS) for name in "abc"]
    answers = serve(one, requests, cancellations={step: "a"})
    assert answers["a", 0].finish_reason == "cancelled"
    assert answers["b", 0].tokens == answers["c", 0].tokens == truth(TOKENS)
    assert one.stats().computed_tokens == 70 + 1 + 2 * 11


def test_tenants_compute_their_own() -> None:
    requests = [request("a", TOKENS, tenant="x"), request("b", TOKENS, tenant="y")]
    one = engine()
    serve(one, requests)
    assert one.stats().computed_tokens == 2 * 70 + 2 * 11


def test_on_the_cpu_kernels_no_bit_changes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path / "tiny"))
    tokens = [1 + number * 37 % (TINY_VOCAB - 1) for number in range(90)]
    sampled = sampling(temperature=0.9, seed=3, logprobs=2)

    def answer(*names: str) -> Answers:
        runner = CpuRunner.load(checkpoint, slots=512, threads=1)
        return serve(build_engine(runner), [request(name, tokens, sampled) for name in names])

    alone = answer("a")["a", 0]
    for other in answer("a", "b", "c").values():
        assert (other.tokens, other.logprobs) == (alone.tokens, alone.logprobs)
