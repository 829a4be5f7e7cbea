"""The engine over the real runners: greedy answers equal those of transformers."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import VOCAB, reference_model, write_variant

from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import GREEDY, Answers, build_engine, request, serve, torch_runner

ANSWER = 12
Truth = Callable[[tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    """Greedy answers by transformers, every token from a pass over the whole sequence."""
    model = reference_model(folder, context=512)

    @cache
    def answer(prompt: tuple[int, ...]) -> list[int]:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(ANSWER):
                logits = model(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return answer


@pytest.fixture(scope="module", params=["torch", "cpu"])
def make_runner(request: pytest.FixtureRequest, folder: Path) -> Callable[[int], Runner]:
    checkpoint = open_checkpoint(folder)

    @cache
    def make(slots: int) -> Runner:
        if request.param == "torch":
            return torch_runner(checkpoint, slots=slots)
        return CpuRunner.load(checkpoint, slots=slots, threads=1, weights="f32")

    return make


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, VOCAB), k=length))


def editing_load(count: int) -> list[EngineRequest]:
    """Prompts that share the head of one document for a while, as rounds of edits do."""
    document = prompt(80, 1)
    rng = random.Random(2)
    return [
        request(
            f"r{index}", document[: rng.randrange(80)] + prompt(rng.randrange(1, 30), 100 + index)
        )
        for index in range(count)
    ]


def check(answers: Answers, requests: list[EngineRequest], truth: Truth) -> None:
    for one in requests:
        answer = answers[one.request_id, 0]
        assert answer.finish_reason == "length"
        assert answer.tokens == truth(tuple(one.token_ids))


@pytest.mark.parametrize("budget", [1, 8, 64, 512])
def test_chunked_and_then_warm(
    make_runner: Callable[[int], Runner], truth: Truth, budget: int
) -> None:
    engine = build_engine(make_runner(512), (), token_budget=budget)
    tokens = prompt(150, 7)
    for name, cached in (("cold", 0), ("warm", 149)):
        answer = serve(engine, [request(name, tokens)])[name, 0]
        assert answer.tokens == truth(tokens)
        assert answer.cached_tokens == cached


@pytest.mark.parametrize("budget", [8, 64])
def test_batched_with_other_requests(
    make_runner: Callable[[int], Runner], truth: Truth, budget: int
) -> None:
    requests = editing_load(20)
    arrivals = {3 * step: requests[2 * step : 2 * step + 2] for step in range(10)}
    doomed = [request(f"doomed{index}", prompt(60, index)) for index in range(4)]
    cancellations = {}
    for index, one in enumerate(doomed):
        arrivals[3 * index].append(one)
        cancellations[3 * index + 4] = one.request_id
    engine = build_engine(make_runner(512), (), token_budget=budget)
    answers = serve(engine, arrivals=arrivals, cancellations=cancellations)
    check(answers, requests, truth)
    assert engine.stats().cached_tokens > 500


def test_preempted_and_resumed(make_runner: Callable[[int], Runner], truth: Truth) -> None:
    requests = [request(f"r{index}", prompt(20 + index, index)) for index in range(8)]
    engine = build_engine(make_runner(150), (), token_budget=32)
    check(serve(engine, requests), requests, truth)
    assert engine.stats().preemptions > 0


def test_several_answers_share_the_prompt(
    make_runner: Callable[[int], Runner], truth: Truth
) -> None:
    engine = build_engine(make_runner(512), ())
    tokens = prompt(100, 3)
    three = EngineSamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, n=3)
    answers = serve(engine, [request("a", tokens, three)])
    assert [answer.tokens for answer in answers.values()] == [truth(tokens)] * 3
    assert engine.stats().computed_tokens == 100 + 3 * (ANSWER - 1)


def test_sampling_with_everything_on_is_reproducible(
    make_runner: Callable[[int], Runner],
) -> None:
    everything = EngineSamplingParams(
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.98,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: 2.0},
        logprobs=3,
        seed=42,
        max_tokens=20,
        ignore_eos=True,
    )
    tokens = prompt(60, 4)
    alone = serve(build_engine(make_runner(512), ()), [request("a", tokens, everything)])["a", 0]
    crowd = [request(f"r{index}", prompt(20, index), GREEDY) for index in range(5)]
    engine = build_engine(make_runner(512), (), token_budget=16)
    together = serve(engine, [*crowd, request("a", tokens, everything)])["a", 0]
    assert together.tokens == alone.tokens
    assert len(alone.logprobs) == 20
