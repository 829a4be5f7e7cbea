"""Compressed KV in the engine: what it frees, what stays exact, and that load changes no answer."""

from typing import Any

import pytest
from serving import Answers, FixedCost, build_engine, request, serve
from toy_engine import prompt, sampling, truth
from toy_method import KeepLoudest
from toy_runner import ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest
from midfill.errors import InvalidRequestError

METHOD = KeepLoudest(3)
LONG = prompt(40)


def engine(slots: int = 512, **options: Any) -> Engine:
    return build_engine(ToyRunner(slots), **({"method": METHOD} | options))


def owned_slots(one: Engine) -> int:
    """Slots that are neither free nor evictable."""
    stats = one.stats()
    return stats.slots_total - stats.slots_free - stats.slots_cached


def alone(tokens: list[int], **fields: object) -> list[int]:
    answers = serve(engine(), [request("alone", tokens, sampling(**fields))])
    return answers["alone", 0].tokens


def texts(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: answer.tokens for key, answer in answers.items()}


def test_answers_are_computed_over_the_keys_that_stay() -> None:
    assert alone(LONG) != truth(LONG)
    assert alone(LONG)[0] == truth(LONG)[0], "the first token sees the whole prompt"
    assert alone([1, 2, 3]) == truth([1, 2, 3]), "the method keeps everything of short prompts"


def test_slots_of_dropped_keys_are_free_while_the_answer_is_written() -> None:
    held: list[int] = []
    serve(engine(), [request("r", LONG)], after_step=lambda one: held.append(owned_slots(one)))
    # Half of the keys fill half of the slots; each step adds a token.
    assert held[0] == len(LONG) // 2
    assert max(held) <= len(LONG) // 2 + 12


def test_the_exact_prompt_stays_cached_and_is_what_the_next_request_finds() -> None:
    one = engine()
    serve(one, [request("first", LONG)])
    typed = [*LONG, 5, 6]
    answers = serve(one, [request("second", typed)])
    # The rows whose queries the method observes are computed again.
    assert answers["second", 0].cached_tokens == len(typed) - METHOD.observed_rows
    assert answers["second", 0].tokens == alone(typed)


def test_what_is_computed_over_compressed_keys_is_never_cached() -> None:
    one = engine()
    first = serve(one, [request("first", LONG)])["first", 0].tokens
    again = [*LONG, *first]
    answers = serve(one, [request("second", again)])
    assert answers["second", 0].cached_tokens <= len(LONG)
    assert answers["second", 0].tokens == alone(again)


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_batches_and_drafts_change_no_answer(budget: int) -> None:
    prompts = {f"r{seed}": prompt(20 + 7 * seed, seed) for seed in range(5)}
    expected = {(name, 0): alone(tokens) for name, tokens in prompts.items()}
    for cost in (None, FixedCost(0.0)):
        one = engine(token_budget=budget, step_cost=cost)
        answers = serve(one, [request(name, tokens) for name, tokens in prompts.items()])
        assert texts(answers) == expected


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_tokens_after_the_compressed_ones_are_scored_as_if_they_had_been_generated(
    budget: int,
) -> None:
    scored = sampling(logprobs=0)
    answer = serve(engine(), [request("first", LONG, scored)])["first", 0]
    one = engine(token_budget=budget)
    forced = request(
        "second",
        [*LONG, *answer.tokens],
        sampling(prompt_logprobs=0, max_tokens=1),
        compress_after=len(LONG),
        score_from=len(LONG),
    )
    one.add(forced)
    outputs = []
    while one.has_work():
        outputs += one.step()
    assert outputs[0].prompt_logprobs is not None
    found = [score.logprob for score in outputs[0].prompt_logprobs]
    assert found == pytest.approx([score.logprob for score in answer.logprobs], abs=1e-5)


def test_questions_after_a_compressed_context_find_it_and_see_what_stays_of_it() -> None:
    one = engine()
    serve(one, [request("context", LONG)])
    exact = one.stats().slots_cached
    for seed in (1, 2):
        asked = [*LONG, *prompt(9, seed)]
        answers = serve(one, [request("asked", asked, compress_after=len(LONG))])
        assert answers["asked", 0].cached_tokens == len(LONG) - METHOD.observed_rows
        assert answers["asked", 0].tokens not in (alone(asked), truth(asked))
    assert one.stats().slots_cached == exact, "nothing that saw compressed keys is cached"


def test_questions_after_a_compressed_context_survive_preemption() -> None:
    asked = {f"r{seed}": prompt(31, seed) for seed in range(4)}
    fields = {"compress_after": 28}
    expected = {
        (name, 0): serve(engine(), [request(name, tokens, **fields)])[name, 0].tokens
        for name, tokens in asked.items()
    }
    one = engine(slots=75)
    answers = serve(one, [request(name, tokens, **fields) for name, tokens in asked.items()])
    assert one.stats().preemptions > 0
    assert texts(answers) == expected


def test_preempted_answers_are_compressed_at_the_same_place_again() -> None:
    prompts = {f"r{seed}": prompt(30, seed) for seed in range(4)}
    one = engine(slots=75)
    answers = serve(one, [request(name, tokens) for name, tokens in prompts.items()])
    assert one.stats().preemptions > 0
    assert texts(answers) == {(name, 0): alone(tokens) for name, tokens in prompts.items()}


@pytest.mark.parametrize("max_running", [1, 2, 10])
def test_answers_to_one_prompt_share_what_stays(max_running: int) -> None:
    held: list[int] = []
    one = engine(max_running=max_running)
    many = request("r", LONG, sampling(n=3))
    answers = serve(one, [many], after_step=lambda each: held.append(owned_slots(each)))
    assert texts(answers) == {("r", index): alone(LONG) for index in range(3)}
    assert max(held) <= max(len(LONG), len(LONG) // 2 + 3 * 12)


def test_cancelled_answers_leave_no_slot_behind() -> None:
    for step in range(6):
        one = engine(token_budget=16)
        answers = serve(one, [request("r", LONG, sampling(n=2))], cancellations={step: "r"})
        assert answers["r", 0].finish_reason == "cancelled"
        one = engine(token_budget=16)
        answers = serve(one, [request("r", LONG, sampling(n=2))], cancellations={step: ("r", 1)})
        assert answers["r", 0].tokens == alone(LONG)


METHODS = {"half": METHOD, "fifth": KeepLoudest(2, one_of=5), "none": None}


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("slots", [90, 512])
def test_requests_with_methods_of_their_own_are_answered_as_alone(budget: int, slots: int) -> None:
    def of(name: str | None, tokens: list[int]) -> EngineRequest:
        return request(f"{name}", tokens, method=name)

    def one(slots: int) -> Engine:
        return engine(slots, methods=METHODS, method=METHODS["fifth"], token_budget=budget)

    names = [*METHODS, None]
    for tokens in ([LONG] * 4, [prompt(20 + 9 * seed, seed) for seed in range(4)]):
        requests = [of(name, own) for name, own in zip(names, tokens, strict=True)]
        alone = {key: value for each in requests for key, value in serve(one(512), [each]).items()}
        assert texts(serve(one(slots), requests)) == texts(alone)
        assert alone["none", 0].tokens == truth(tokens[2])
    assert alone["None", 0].tokens != truth(tokens[3]), "the default compresses"
    assert len({tuple(serve(one(512), [of(name, LONG)])[name, 0].tokens) for name in METHODS}) == 3


def test_a_method_is_refused_where_requests_may_choose_none() -> None:
    one = engine()
    with pytest.raises(InvalidRequestError, match="can't choose a method"):
        one.add(request("r", LONG, method="half"))
    assert not one.has_work()
