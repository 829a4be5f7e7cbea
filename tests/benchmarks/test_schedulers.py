"""Schedulers beside each other: what is compared can be run, and the tables say what came out."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from made_step_costs import STEP_COSTS
from tiny_checkpoints import write_tiny

from benchmarks.schedulers import (
    COMPARISONS,
    PlanningFigures,
    RowFigures,
    SchedulersReport,
    measure_planning,
    measure_rows,
    scheduler_tables,
)
from midfill.engine.scheduling.registry import resolve_scheduler
from midfill_lab.bench.serving.step_costs import StepCosts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture
def costs() -> StepCosts:
    return STEP_COSTS


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_scheduler_of_a_comparison_exists(name: str) -> None:
    comparison = COMPARISONS[name]
    for row in comparison.rows:
        resolve_scheduler(row.scheduler)
    assert len({str(row) for row in comparison.rows}) == len(comparison.rows)


def test_rows_have_a_figure_per_seed_at_a_share_of_the_capacity(
    folder: Path, costs: StepCosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(costs))
    comparison = COMPARISONS["deadlines"]
    load = msgspec.structs.replace(comparison.load, requests=12, characters=200, output_tokens=4)
    fewer = replace(comparison, load=load, rows=comparison.rows[:2])
    monkeypatch.setitem(COMPARISONS, "deadlines", fewer)
    rows = list(measure_rows(str(folder), file, ["deadlines"], seeds=2))
    assert [row.row for row in rows] == ["`sarathi-serve` at 0.5", "`sarathi-serve` at 0.75"]
    assert all(len(values) == 2 for row in rows for values in row.figures.values())
    assert rows[1].rates == pytest.approx([1.5 * rate for rate in rows[0].rates])


def test_plans_are_timed_beside_their_steps(folder: Path, costs: StepCosts) -> None:
    found = measure_planning(str(folder), costs, "edf")
    assert found.plan_seconds > 0
    assert found.step_seconds >= costs.rows[0]


def test_the_tables_show_means_and_shares(costs: StepCosts) -> None:
    figures = {"program mean": [2.0, 4.0], "program p95": [0.01, 0.02], "cached": [0.5, 0.7]}
    report = SchedulersReport(
        costs=costs,
        is_real=False,
        seeds=2,
        rows=[
            RowFigures(comparison="agents", row="`continuum`", rates=[1.0, 2.0], figures=figures)
        ],
        planning=[PlanningFigures(scheduler="edf", plan_seconds=0.001, step_seconds=0.05)],
    )
    agents, planning = scheduler_tables(report)
    assert agents.rows == [
        {
            "scheduler": "`continuum`",
            "program mean": "3,000",
            "program p95": "15.0",
            "cached": "60%",
        }
    ]
    assert "1.50 requests/s" in (agents.caption or "")
    assert planning.rows[0]["share"] == "2.0%"
