"""Prompt scores are the model's own log probabilities, however the prompt was computed."""

import math

import numpy as np
import pytest
from toy_engine import engine, prompt, sampling, truth
from toy_runner import VOCAB, ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineOutput, EngineRequest, TokenLogprobs
from midfill.errors import InvalidRequestError
from midfill.runners.forward.logits import log_softmax
from serving import FixedCost, build_engine, next_logits, request, serve

TOKENS = prompt(70, 3)
SCORED = {"prompt_logprobs": 3}


def reference(tokens: list[int]) -> list[TokenLogprobs]:
    """Each token's score from a pass over what precedes it."""
    runner = ToyRunner(256)
    scores = []
    for place in range(1, len(tokens)):
        logprobs = log_softmax(next_logits(runner, tokens[:place]))
        top = (-logprobs).argsort(kind="stable")[:3]
        scores.append(
            TokenLogprobs(
                float(logprobs[tokens[place]]),
                [(int(token_id), float(logprobs[token_id])) for token_id in top],
            )
        )
    return scores


def check(scores: list[TokenLogprobs] | None, tokens: list[int]) -> None:
    assert scores is not None
    check_equal(scores, reference(tokens))


def check_equal(scores: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(scores) == len(expected)
    for score, truth_ in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(truth_.logprob, abs=1e-5)
        assert [token_id for token_id, _ in score.top] == [token_id for token_id, _ in truth_.top]


def outputs_of(one: Engine, *requests: EngineRequest) -> list[EngineOutput]:
    for each in requests:
        one.add(each)
    outputs = []
    while one.has_work():
        outputs += one.step()
    return outputs


def tokens_of(outputs: list[EngineOutput], request_id: str = "a") -> list[int]:
    own = [output for output in outputs if output.request_id == request_id]
    return [token_id for output in own for token_id in output.token_ids]


def scores_of(outputs: list[EngineOutput], request_id: str = "a") -> list[TokenLogprobs] | None:
    """The scores of a request, which come once, with the first output of the first answer."""
    own = [output for output in outputs if output.request_id == request_id]
    first = next(output for output in own if output.index == 0)
    assert all(output.prompt_logprobs is None for output in own if output is not first)
    return first.prompt_logprobs


@pytest.mark.parametrize("budget", [1, 8, 64, 512])
def test_in_chunks_of_any_size(budget: int) -> None:
    outputs = outputs_of(engine(token_budget=budget), request("a", TOKENS, sampling(**SCORED)))
    check(scores_of(outputs), TOKENS)
    assert tokens_of(outputs) == truth(TOKENS)


def test_a_cached_prompt_is_computed_again_and_its_kv_stays_cached_once() -> None:
    one = engine()
    serve(one, [request("warm", TOKENS)])
    cached = one.stats().slots_cached
    outputs = outputs_of(one, request("a", TOKENS, sampling(**SCORED)))
    check(scores_of(outputs), TOKENS)
    assert outputs[0].cached_tokens == 0
    assert one.stats().slots_cached == cached
    assert outputs_of(one, request("b", TOKENS))[0].cached_tokens == 69


@pytest.mark.parametrize("budget", [1, 8, 512])
@pytest.mark.parametrize("start", [1, 40, 69])
def test_from_a_token_on_what_precedes_it_may_be_cached(budget: int, start: int) -> None:
    one = engine(token_budget=budget)
    serve(one, [request("warm", TOKENS)])
    scored = request("a", TOKENS, sampling(prompt_logprobs=3), score_from=start)
    outputs = outputs_of(one, scored)
    assert outputs[0].cached_tokens == start - 1
    scores = scores_of(outputs)
    assert scores is not None
    check_equal(scores, reference(TOKENS)[start - 1 :])


def test_beside_others_and_equal_ones() -> None:
    outputs = outputs_of(
        engine(1024, token_budget=32),
        request("plain", TOKENS),
        *(request(name, TOKENS, sampling(**SCORED)) for name in "ab"),
        request("c", prompt(50, 4), sampling(prompt_logprobs=0, logprobs=2)),
    )
    check(scores_of(outputs, "a"), TOKENS)
    check(scores_of(outputs, "b"), TOKENS)
    scores = scores_of(outputs, "c")
    assert scores is not None
    assert [score.top for score in scores] == [[]] * 49
    assert scores_of(outputs, "plain") is None


def test_of_several_answers_the_first_reports_them() -> None:
    outputs = outputs_of(engine(), request("a", TOKENS, sampling(n=3, **SCORED)))
    check(scores_of(outputs), TOKENS)


def test_preempted_and_resumed() -> None:
    """The first decodes until slots run out, and the scored prompt gives up its own."""
    one = engine(140, token_budget=16)
    requests = [
        request("first", prompt(40, 9), sampling(max_tokens=60)),
        request("a", TOKENS, sampling(max_tokens=20, **SCORED)),
    ]
    outputs = outputs_of(one, *requests)
    assert one.stats().preemptions
    check(scores_of(outputs), TOKENS)
    assert tokens_of(outputs) == truth(TOKENS, 20)


def test_with_drafts() -> None:
    tokens = prompt(10, 5) * 6
    plain = build_engine(ToyRunner(512, positions=0.2), ())
    drafting = build_engine(ToyRunner(512, positions=0.2), (), step_cost=FixedCost())
    one = request("a", tokens, sampling(max_tokens=40, **SCORED))
    expected, outputs = outputs_of(plain, one), outputs_of(drafting, one)
    assert drafting.stats().accepted_tokens
    assert tokens_of(outputs) == tokens_of(expected)
    assert scores_of(outputs) == scores_of(expected)


def test_a_prompt_of_one_token_has_none() -> None:
    assert scores_of(outputs_of(engine(), request("a", [5], sampling(**SCORED)))) == []


def test_impossible_tokens_have_the_probability_zero() -> None:
    class Barred(ToyRunner):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            logits = super().forward(batch)
            logits[:, TOKENS[5]] = -np.inf
            return logits

    outputs = outputs_of(
        build_engine(Barred(256), ()), request("a", TOKENS, sampling(max_tokens=1, **SCORED))
    )
    scores = scores_of(outputs)
    assert scores is not None
    assert scores[4].logprob == -math.inf


@pytest.mark.parametrize("value", [-1, VOCAB + 1])
def test_a_number_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_logprobs must be from 0 to"):
        engine().add(request("a", TOKENS, sampling(prompt_logprobs=value)))
