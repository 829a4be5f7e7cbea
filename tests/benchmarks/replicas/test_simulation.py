"""The simulation of replicas, where what it has to give is known."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replicas.placement import Placement, first_fit, moved
from benchmarks.replicas.population import Step, population
from benchmarks.replicas.simulation import Simulation, SimulationResult, StepCosts
from midfill.config import RouterName
from midfill.engine.routing import choose, preference

COSTS = StepCosts(prefill_seconds=0.001, decode_seconds=0.01, decode_weight=0.25)


def run(
    sessions: list[list[Step]],
    replicas: int = 1,
    router: RouterName = "document",
    capacity: int = 10**6,
    output_tokens: int = 10,
) -> SimulationResult:
    """Return what a simulation gives."""
    return Simulation(
        sessions,
        COSTS,
        replicas=replicas,
        router=router,
        capacity=capacity,
        output_tokens=output_tokens,
        think_seconds=1.0,
    ).run()


def typing(document: int, requests: int, think: float = 0.0) -> list[Step]:
    """Return a document of 1,000 tokens that grows by 10 per request."""
    return [Step(document, 1000, 1000, think)] + [
        Step(document, 1000 + 10 * number, 10, think) for number in range(1, requests)
    ]


def test_one_request_takes_the_time_of_its_tokens() -> None:
    result = run([[Step(0, 1000, 1000)]])
    assert result.first_p50 == pytest.approx(1.0)
    assert result.hit_rate == 0
    assert result.utilisation == pytest.approx(1.0)


def test_prompts_that_come_together_share_a_replicas_time() -> None:
    both = run([[Step(0, 1000, 1000)], [Step(1, 1000, 1000)]])
    assert both.first_p95 == pytest.approx(2.0)


@pytest.mark.parametrize(("users", "seconds"), [(1, 1.0), (4, 1.0), (8, 2.0)])
def test_answers_decode_together_at_no_cost_until_they_weigh_more_than_one(
    users: int, seconds: float
) -> None:
    result = run([[Step(user, 1, 1)] for user in range(users)], output_tokens=100)
    assert result.seconds == pytest.approx(seconds, abs=0.02)


def test_a_document_that_stays_computes_what_is_new() -> None:
    result = run([typing(0, 5)], replicas=4)
    prompts = 1000 + sum(1000 + 10 * number for number in range(1, 5))
    assert result.hit_rate == pytest.approx(1 - (1000 + 4 * 10) / prompts)
    assert result.spilled == 0


def test_in_turn_every_replica_computes_each_document_and_what_it_has_missed() -> None:
    result = run([typing(0, 4)], replicas=2, router="round-robin")
    prompts = 1000 + 1010 + 1020 + 1030
    assert result.hit_rate == pytest.approx(1 - (1000 + 1010 + 20 + 20) / prompts)


def test_what_does_not_fit_is_computed_again() -> None:
    sessions = [[Step(0, 1000, 1000), Step(1, 1000, 1000), Step(0, 1000, 10)]]
    assert run(sessions, capacity=2000).hit_rate == pytest.approx(1 - 2010 / 3000)
    assert run(sessions, capacity=1500).hit_rate == 0


def test_a_document_that_is_not_new_is_held_from_the_beginning() -> None:
    assert run([[Step(0, 1000, 10)]], replicas=3).hit_rate == pytest.approx(0.99)


def test_load_spreads_over_replicas() -> None:
    sessions = [typing(user, 10, think=1.0) for user in range(400)]
    result = run(sessions, replicas=10)
    assert result.requests == 4000
    assert 1.0 <= result.imbalance < 1.6


@dataclass(frozen=True)
class Target:
    """A replica as ``midfill.engine.routing`` sees it."""

    address: str
    running: int
    slots: int = 8


@given(st.text(max_size=5), st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_it_chooses_as_the_real_router_does(document: str, running: list[int]) -> None:
    targets = [Target(str(number), load) for number, load in enumerate(running)]
    ranked = [int(each.address) for each in preference(document, targets)]
    chosen = choose(document, targets)
    assert chosen is not None
    assert first_fit(ranked, running, slots=8) == int(chosen.address)


def test_a_replica_moves_only_its_share_of_the_documents() -> None:
    documents = 4000
    assert moved(range(10), range(11), documents) == pytest.approx(1 / 11, rel=0.2)
    assert moved(range(10), range(9), documents) == pytest.approx(1 / 10, rel=0.2)
    before, after = Placement(range(10)).homes(documents), Placement(range(9)).homes(documents)
    assert set(before[before != after]) == {9}


def test_a_population_has_the_prompts_that_were_counted() -> None:
    sessions = population(50, 20, [(500, 7)], seed=1)
    steps = [step for session in sessions for step in session]
    assert len(steps) == 1000
    assert {step.prompt for step in steps} == {500}
    assert {step.new for step in steps} == {500, 7}
    opened = {step.document for step in steps if step.new == 500}
    assert opened == {step.document for step in steps if step.document >= 150}
    assert 0 < len(opened) < 40
    assert sum(each.think for session in sessions for each in session[1:]) / 950 == pytest.approx(
        1.0, rel=0.2
    )
    assert population(50, 20, [(500, 7)], seed=1) == sessions
