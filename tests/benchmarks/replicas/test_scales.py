"""What the simulation is fed with, and the tables of both commands."""

import msgspec

from benchmarks.replicas.failover import Failover
from benchmarks.replicas.load import ReplicaLoad, loads
from benchmarks.replicas.measure import ReplicasReport, RoutedRun, replicas_table
from benchmarks.replicas.scales import (
    Moves,
    ScaleOptions,
    ScalesReport,
    edit_samples,
    scales_table,
)
from benchmarks.replicas.simulation import SimulationResult, StepCosts
from midfill.system.machine import describe_machine


def test_prompts_of_the_editing_mix_are_mostly_cached() -> None:
    samples = edit_samples(60, seed=0)
    assert all(0 < new <= prompt for prompt, new in samples)
    prompts, new = (sum(column) for column in zip(*samples, strict=True))
    assert new < 0.2 * prompts


def test_the_loads_are_the_same_every_time_and_share_no_document_between_users() -> None:
    options = ReplicaLoad(users=3, rounds=2, edits=4, characters=1200)
    both = loads(options)
    assert both == loads(options)
    assert {name: sum(map(len, users)) for name, users in both.items()} == {
        "rounds": 6,
        "edits": 12,
    }
    for users in both.values():
        documents = [{ask.document for ask in asks} for asks in users]
        assert sum(map(len, documents)) == len(set.union(*documents))
        assert all(ask.body["temperature"] == 0 for asks in users for ask in asks)


def test_hit_rates_are_compared_with_those_of_one_replica() -> None:
    one = RoutedRun(
        load="edits", replicas=1, router="document", requests=9, hit_rate=0.8, simulated=0.8,
        computed_tokens=1000, wall_seconds=5.0, different=0,
    )  # fmt: skip
    two = msgspec.structs.replace(one, replicas=2, hit_rate=0.4)
    lost = Failover(
        requests=9, wrong=0, failed=1, resumed=2, output_tokens=64, longest_before=0.5,
        longest_after=1.5, answered_seconds=1.2, restored_seconds=20.0,
    )  # fmt: skip
    report = ReplicasReport(
        model="m", machine=describe_machine(), load=ReplicaLoad(), runs=[one, two], failover=lost
    )
    table = replicas_table(report).markdown()
    assert "| edits | 2 | document | 40.0% | 80.0% | 50.0% | 1,000 | 5.0 | 0 |" in table
    assert "of 9 requests 0 were answered otherwise, 1 failed, 2 were continued" in table


def test_a_simulations_costs_and_moves_are_told() -> None:
    result = SimulationResult(
        replicas=10, users=1000, router="document", slots=32, requests=5000, hit_rate=0.95,
        first_p50=0.004, first_p95=1.0, imbalance=1.1, spilled=0.001, utilisation=0.4, seconds=9.0,
    )  # fmt: skip
    report = ScalesReport(
        model="m", machine=describe_machine(), options=ScaleOptions(),
        costs=StepCosts(prefill_seconds=0.002, decode_seconds=0.02, decode_weight=0.3),
        think_seconds=30.0, prompt_tokens=800.0, new_tokens=30.0, results=[result],
        moves={10: Moves(added=0.09, lost=0.1)},
    )  # fmt: skip
    table = scales_table(report).markdown()
    assert "| 10 | 1,000 | document, 32 slots | 95.0% | 4 | 1000 | 40% | 1.10 | 0.10% |" in table
    assert "9.00% | 10.00% |" in table
    assert "2.00 ms per prompt token" in table
