"""An answer that one engine has begun goes on in another as it would have in the first."""

import pytest
from toy_engine import engine, prompt, sampling, truth

from midfill.errors import InvalidRequestError
from serving import request, serve

PROMPT = prompt(40)


@pytest.mark.parametrize("begun", [1, 5, 11])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.8},
    ],
)
def test_it_has_the_same_tokens(begun: int, fields: dict[str, object]) -> None:
    params = sampling(**fields)
    whole = serve(engine(), [request("a", PROMPT, params)])["a", 0].tokens
    going_on = request("b", PROMPT, params, answered=whole[:begun])
    rest = serve(engine(), [going_on])["b", 0]
    assert rest.tokens == whole[begun:]
    assert rest.finish_reason == "length"


def test_what_is_cached_of_the_prompt_is_not_computed_again() -> None:
    one = engine()
    first = serve(one, [request("a", PROMPT, sampling(max_tokens=1))])["a", 0].tokens
    computed = one.stats().computed_tokens
    rest = serve(one, [request("b", PROMPT, sampling(), answered=first)])["b", 0]
    assert first + rest.tokens == truth(PROMPT)
    assert rest.cached_tokens == len(PROMPT)
    assert one.stats().computed_tokens - computed == 11  # a row for each further token


@pytest.mark.parametrize("slots", [60, 75])
def test_it_survives_preemption(slots: int) -> None:
    prompts = [prompt(30, seed) for seed in range(4)]
    begun = [truth(each, 3) for each in prompts]
    requests = [
        request(f"r{place}", each, sampling(), answered=answered)
        for place, (each, answered) in enumerate(zip(prompts, begun, strict=True))
    ]
    one = engine(slots)
    answers = serve(one, requests)
    for place, each in enumerate(prompts):
        assert begun[place] + answers[f"r{place}", 0].tokens == truth(each)


@pytest.mark.parametrize(
    ("fields", "answered"),
    [({}, [1] * 12), ({}, [-1]), ({}, [10**6]), ({"n": 2}, [1]), ({"prompt_logprobs": 0}, [1])],
)
def test_what_cannot_go_on_is_refused(fields: dict[str, object], answered: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        engine().add(request("a", PROMPT, sampling(**fields), answered=answered))
    assert raised.value.param == "answered"
