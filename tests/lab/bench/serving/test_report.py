"""The report of a load: its tables, the check of one run against another, its plot."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.tables import KINDS
from midfill.system.machine import describe_machine
from midfill_lab.bench.serving.metrics import parse_limits
from midfill_lab.bench.serving.plot import plot_serving
from midfill_lab.bench.serving.report import (
    SERVER,
    SIMULATED,
    ServingReport,
    median_ratios,
    serving_run,
    serving_tables,
)
from midfill_lab.bench.serving.simulation import SimulatedModel, simulate_load
from midfill_lab.bench.serving.workload import WorkloadOptions
from midfill_lab.bench.serving.workloads import make_requests


@pytest.fixture(scope="module")
def report(model: SimulatedModel) -> ServingReport:
    """Return a report of two simulated runs, as if one were of a server."""
    load = WorkloadOptions(
        workload="mixed", requests=30, characters=300, output_tokens=6, tenants=2, request_rate=5.0
    )
    results = simulate_load(model, make_requests(load))
    limits = parse_limits("ttft:500")
    return ServingReport(
        model="tiny",
        machine=describe_machine(),
        workload=load,
        settings="--token-budget 128",
        limits=limits,
        runs=[serving_run(target, results, limits) for target in (SERVER, SIMULATED)],
        costs=model.costs,
    )


def test_runs_of_the_same_times_agree(report: ServingReport) -> None:
    assert set(median_ratios(report)) == {"ttft", "tpot", "itl", "e2el"}
    assert all(ratio == pytest.approx(1.0) for ratio in median_ratios(report).values())


def test_one_run_is_compared_with_nothing(report: ServingReport) -> None:
    alone = msgspec.structs.replace(report, runs=report.runs[1:])
    assert median_ratios(alone) == {}
    assert alone.run(SERVER) is None
    assert len(serving_tables(alone)) == 2


def test_the_tables_show_latencies_by_kind_throughput_and_the_check(report: ServingReport) -> None:
    latencies, throughput, check = (table.markdown() for table in serving_tables(report))
    assert "| server | document | TTFT |" in latencies
    assert "| simulated | all | E2EL |" in latencies
    assert "30 of 30" in throughput
    assert "Goodput: ttft:500" in throughput
    assert "seed 0" in throughput
    assert "| TTFT |" in check
    assert "1.00x" in check


def test_a_report_comes_back_from_its_file(report: ServingReport) -> None:
    written = msgspec.json.encode(report)
    assert msgspec.json.decode(written, type=ServingReport) == report
    kind = KINDS["serving"]
    assert kind.report is ServingReport
    assert len(kind.tables(report)) == 3


def test_the_plot(report: ServingReport, tmp_path: Path) -> None:
    plot_serving(report, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")
