"""The simulation of experts on two devices: its clock, and the order of the policies."""

import numpy as np
import pytest

from benchmarks.expert_offload import (
    ASSUMED,
    PUBLISHED,
    MadeRouters,
    Outcome,
    offload_table,
    policies,
    replay,
    simulate,
    timed,
)
from midfill.runners.torch.experts.assignment import ExpertCosts, assign

ROUTERS = MadeRouters(layers=4, experts=32, per_token=4)


def outcomes(share: float, rows: int, costs: ExpertCosts = PUBLISHED) -> dict[str, Outcome]:
    steps = list(ROUTERS.steps(max(240 // rows, 6), rows, seed=0))
    slots = round(share * ROUTERS.experts)
    return {policy.name: replay(steps, ROUTERS, policy, slots, costs) for policy in policies(costs)}


def test_an_assignment_takes_what_experts_cost() -> None:
    rows = {0: 3, 1: 1, 2: 2, 5: 1}
    plan = assign(rows, {0, 1}, 4, PUBLISHED)
    assert timed(plan, rows, PUBLISHED) == plan
    slower = ExpertCosts(slow_start=10.0, slow_expert=1.0, slow_row=10.0, fast=5.0, copy=4.0)
    assert timed(plan, rows, slower).seconds > plan.seconds


def test_predictions_are_like_what_comes_and_less_so_further_ahead() -> None:
    recalls = np.zeros(3)
    for step in ROUTERS.steps(60, 1, seed=0):
        for ahead in range(3):
            predicted, later = step[0].ahead[ahead], step[1 + ahead].rows
            recalls[ahead] += sum(expert in predicted for expert in later) / len(later) / 60
    assert recalls[0] > recalls[1] > recalls[2] > ROUTERS.per_token / ROUTERS.experts


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_experts_stay_by_what_routers_wanted(share: float) -> None:
    found = outcomes(share, 1)
    held = {
        rule: found[f"nothing ahead{rule}"].held
        for rule in ("", ", least recently used", ", at random")
    }
    assert held[""] > held[", least recently used"] > held[", at random"]


@pytest.mark.parametrize(("share", "rows"), [(0.25, 1), (0.5, 1), (0.25, 40)])
@pytest.mark.parametrize("costs", [PUBLISHED, ASSUMED])
def test_all_of_it_is_fastest(share: float, rows: int, costs: ExpertCosts) -> None:
    found = outcomes(share, rows, costs)
    best = found["all of it"].seconds
    for simpler in ("always copied", "always on the CPU"):
        assert best < found[simpler].seconds, simpler
    # An expert that is copied ahead takes the place of one that may be needed, too.
    for simpler in ("nothing ahead", "a fixed part held"):
        assert best < 1.05 * found[simpler].seconds, simpler


def test_copies_ahead_save_time_where_the_bus_is_slow() -> None:
    found = outcomes(0.25, 1, ASSUMED)
    assert found["all of it"].held > found["nothing ahead"].held
    assert found["all of it"].seconds < found["nothing ahead"].seconds


def test_nothing_is_copied_where_all_are_held() -> None:
    found = outcomes(1.0, 1)
    assert all(each.copied == 0 for each in found.values())
    assert found["all of it"].held == found["all of it"].chosen


def test_a_row_per_policy_and_a_column_per_size() -> None:
    report = simulate(ROUTERS, "made up", PUBLISHED, ((0.25, 1), (0.5, 8)), steps=16)
    table = offload_table(report)
    assert len(table.rows) == len(policies(PUBLISHED))
    assert set(table.rows[0]) == {"experts", "25% held, 1 row", "50% held, 8 rows"}
