"""Scheduling policies by name: each is found, and what is wrong is said in one line."""

import random

import pytest
from toy_engine import prompt, sampling, truth
from toy_runner import LAYERS, ToyRunner

from midfill.config import DEFAULT_SCHEDULER, ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import lookahead, scheduler_policy
from midfill.engine.request import EngineRequest, RequestHints
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.policies.shortest_first import ShortestPromptFirst
from midfill.engine.scheduling.registry import POLICIES, ChosenPolicies, resolve_scheduler
from midfill.errors import InvalidRequestError
from serving import check_idle, request, serve


def test_the_default_is_sarathi_serve_with_the_queue_as_it_is() -> None:
    assert resolve_scheduler(DEFAULT_SCHEDULER) == ChosenPolicies(
        SarathiServe, order=ShortestPromptFirst()
    )


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_found_with_and_without_its_options(name: str) -> None:
    options = POLICIES[name].options()
    settings = ",".join(f"{option}={value}" for option, value in options.items())
    assert resolve_scheduler(f"{name}:{settings}").order == resolve_scheduler(name).order
    assert not {"token_budget", "max_running"} & set(options)


def test_an_order_goes_with_a_way_of_batching() -> None:
    chosen = resolve_scheduler("layered-prefill+shortest-first:ageing=2e+1")
    assert chosen.by_layers
    assert chosen.order == ShortestPromptFirst(ageing=20.0)


def test_options_of_the_batching_take_the_place_of_the_server_s_own() -> None:
    chosen = resolve_scheduler("sarathi-serve:short_share=0")
    assert chosen.build_batching(7, 3, short_share=0.5) == SarathiServe(7, 3, short_share=0.0)
    assert (
        resolve_scheduler(DEFAULT_SCHEDULER).build_batching(7, 3, short_share=0.5).short_share
        == 0.5
    )


@pytest.mark.parametrize(
    ("specification", "said"),
    [
        ("sarathi-server", "there is no scheduler 'sarathi-server'; did you mean 'sarathi-serve'?"),
        ("", "there is no scheduler ''; there are sarathi-serve, dynamic-chunks, nexus, "),
        ("none", "there is no scheduler 'none'; there are sarathi-serve, "),
        ("edf+priority", "edf and priority both decide the order; name one of them"),
        ("sarathi-serve+layered-prefill",
         "sarathi-serve and layered-prefill both decide the batching; name one of them"),
        ("shortest-first:aging=2",
         "shortest-first has no option 'aging'; did you mean 'ageing'?"),
        ("shortest-first:ageing=-2", "ageing must be at least 0"),
        ("shortest-first:ageing=nan", "ageing must be at least 0"),
        ("shortest-first:ageing", "shortest-first: write ageing=VALUE"),
        ("edf:max_wait=0", "max_wait must be above 0"),
        ("sarathi-serve:token_budget=5", "sarathi-serve has no option 'token_budget'"),
        ("sarathi-serve:gap=-1", "gap must be a number of seconds, at least 0"),
        ("prefill-first:gap=1", "prefill-first has no option 'gap'; there are min_shared_prefix"),
        ("nexus:decode_slack=0.5", "decode_slack and prefill_slack must be at least 1"),
        ("nexus:share=101", "share must be from 0 to 100 percent"),
        ("sarathi-serve:short_share=1", "short_share must be at least 0 and below 1"),
        ("layered-prefill:layers=3", "layered-prefill has no option 'layers': it has none"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(specification: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        resolve_scheduler(specification)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_the_same_under_every_policy(name: str) -> None:
    chance = random.Random(name)
    options = ModelOptions(scheduler=name, token_budget=16, max_running=4)
    one = Engine(
        ToyRunner(180),
        (),
        EngineOptions(max_running=4, lookahead=lookahead(options)),
        policy=scheduler_policy(options, LAYERS),
    )
    arrivals: dict[int, list[EngineRequest]] = {}
    prompts = {str(n): prompt(chance.randint(1, 100), n % 7) for n in range(16)}
    for name, tokens in prompts.items():
        hints = RequestHints(priority=chance.randint(-2, 2), program=chance.choice(["", "p"]))
        asked = request(name, tokens, sampling(), hints=hints)
        arrivals.setdefault(chance.randint(0, 40), []).append(asked)
    answers = serve(one, arrivals=arrivals)
    assert {name: answers[name, 0].tokens for name in prompts} == {
        name: truth(tokens) for name, tokens in prompts.items()
    }
    check_idle(one)
