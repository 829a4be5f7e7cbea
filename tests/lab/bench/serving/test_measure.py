"""Running a load: simulated with given costs, and on a server that is started for it."""

from pathlib import Path

import msgspec
import pytest

from midfill.config import ModelOptions
from midfill.errors import MidfillError
from midfill.serving.options import ServeOptions
from midfill_lab.bench.serving.measure import (
    ServingPlan,
    measure_serving,
    request_overhead,
    serve_flags,
    tenant_keys,
)
from midfill_lab.bench.serving.metrics import OK, RequestResult
from midfill_lab.bench.serving.report import SERVER, SIMULATED, median_ratios
from midfill_lab.bench.serving.step_costs import StepCosts, StepWork
from midfill_lab.bench.serving.workload import WorkloadOptions

LOAD = WorkloadOptions(
    workload="editing", requests=12, request_rate=20.0, users=2, tenants=2, characters=400,
    output_tokens=4,
)  # fmt: skip


@pytest.fixture
def costs_file(costs: StepCosts, tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(costs))
    return path


def test_a_simulated_load_needs_no_server(folder: Path, costs_file: Path) -> None:
    served = ServeOptions(model=str(folder), options=ModelOptions(adapter="none"))
    plan = ServingPlan(workload=LOAD, served=served, runs=(SIMULATED,), costs=costs_file)
    report = measure_serving(plan)
    assert [run.target for run in report.runs] == [SIMULATED]
    assert report.runs[0].metrics.completed == 12
    assert report.runs[0].metrics.fairness is not None
    assert measure_serving(plan).runs == report.runs


def test_a_file_of_something_else_is_no_file_of_costs(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"model": 3}')
    served = ServeOptions(model=str(folder))
    plan = ServingPlan(workload=LOAD, served=served, runs=(SIMULATED,), costs=path)
    with pytest.raises(MidfillError, match="holds no step costs"):
        measure_serving(plan)


def test_the_server_gets_the_plans_options() -> None:
    options = ModelOptions(
        threads=2, kv_memory=4096, token_budget=64, scheduler="layered-prefill", speculation=False,
        adapter="none",
    )  # fmt: skip
    served = ServeOptions(model="m", options=options, idle_prefill=False, stream_interval=0.01)
    line = " ".join(serve_flags(served))
    for part in (
        "--scheduler layered-prefill", "--token-budget 64", "--stream-interval-ms 10",
        "--threads 2", "--kv-memory 4096", "--adapter none", "--no-speculation",
        "--no-idle-prefill",
    ):  # fmt: skip
        assert part in line


def test_tenants_have_keys_where_there_are_several() -> None:
    assert tenant_keys(WorkloadOptions(tenants=3)) == ("key-0", "key-1", "key-2")
    assert tenant_keys(WorkloadOptions()) == ()


def test_what_a_first_token_takes_beyond_its_step_is_overhead(costs: StepCosts) -> None:
    step = costs.seconds(StepWork(10, 1, 1, 10, 100))
    probe = RequestResult(
        index=0, kind="request", tenant="", due=0.0, sent=0.0, arrivals=[step + 0.003], ended=1.0,
        prompt_tokens=10, completion_tokens=2,
    )  # fmt: skip
    assert request_overhead([probe] * 3, costs) == pytest.approx(0.003)
    assert request_overhead([], costs) == 0.0


@pytest.mark.slow
def test_a_load_on_a_server_and_simulated(folder: Path, costs_file: Path) -> None:
    served = ServeOptions(
        model=str(folder), options=ModelOptions(threads=1, adapter="none", speculation=False)
    )
    plan = ServingPlan(workload=LOAD, served=served, runs=(SERVER, SIMULATED), costs=costs_file)
    report = measure_serving(plan)
    for run in report.runs:
        assert {result.status for result in run.requests} == {OK}
        assert {result.completion_tokens for result in run.requests} == {4}
    assert set(median_ratios(report)) == {"ttft", "tpot", "itl", "e2el"}
