"""DeficitRoundRobin as a pure function: whose turn it is, and that it is fair on tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.scheduling.policies.deficit_round_robin import DeficitRoundRobin, Turn, Turns

TURNS = st.lists(st.integers(-2000, 600), min_size=1, max_size=6).map(
    lambda deficits: tuple(Turn(f"t{n}", deficit) for n, deficit in enumerate(deficits))
)


def one_turn_at_a_time(turns: Turns, quantum: int) -> Turns:
    """The algorithm as its authors describe it."""
    while turns[0].deficit <= 0:
        first, *others = turns
        after = others[0] if others else first
        turns = (*others, first)
        assert turns[0] == after
        turns = (after._replace(deficit=after.deficit + quantum), *turns[1:])
    return turns


@given(TURNS, st.integers(1, 300))
def test_turns_are_passed_on_as_one_by_one(turns: Turns, quantum: int) -> None:
    assert DeficitRoundRobin(quantum).advance(turns) == one_turn_at_a_time(turns, quantum)


@given(TURNS)
def test_a_tenant_keeps_its_turn_while_its_deficit_lasts(turns: Turns) -> None:
    policy = DeficitRoundRobin()
    advanced = policy.advance(turns)
    assert advanced[0].deficit > 0
    assert policy.advance(advanced) == advanced


def test_a_deep_debt_takes_no_longer() -> None:
    turns = (Turn("a", -(10**15)), Turn("b", -(10**15)))
    assert DeficitRoundRobin(1).advance(turns)[0] == Turn("b", 1)


@given(
    st.lists(st.lists(st.integers(1, 700), min_size=1), min_size=2, max_size=5),
    st.integers(1, 600),
)
def test_tenants_with_requests_get_alike(costs: list[list[int]], quantum: int) -> None:
    """Whatever a tenant's requests cost, at any time, but for a quantum and one request."""
    policy = DeficitRoundRobin(quantum)
    turns: Turns = tuple(Turn(str(tenant), 0) for tenant in range(len(costs)))
    served = [0] * len(costs)
    bound = quantum + max(map(max, costs))
    for request in range(200):
        turns = policy.advance(turns)
        tenant = int(turns[0].tenant)
        cost = costs[tenant][request % len(costs[tenant])]
        served[tenant] += cost
        turns = policy.charge(turns, turns[0].tenant, cost)
        assert max(served) - min(served) <= 2 * bound


def test_no_tenants() -> None:
    assert DeficitRoundRobin().advance(()) == ()


def test_a_quantum_is_positive() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        DeficitRoundRobin(0)
