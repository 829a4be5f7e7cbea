"""The report of a serving load: its figures, and tables of them."""

from collections.abc import Iterator, Sequence

import msgspec

from midfill.system.machine import Machine
from midfill_lab.bench.serving.metrics import (
    Latency,
    Limits,
    RequestResult,
    ServingMetrics,
    Spread,
    summarise,
)
from midfill_lab.bench.serving.step_costs import StepCosts
from midfill_lab.bench.serving.workload import WorkloadOptions
from midfill_lab.reporting import ResultTable

SERVER, SIMULATED = "server", "simulated"
"""What a load ran on."""


class ServingRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load.

    Attributes:
        target: ``SERVER`` or ``SIMULATED``.
        metrics: its figures.
        requests: what became of each request.
    """

    target: str
    metrics: ServingMetrics
    requests: list[RequestResult]


class ServingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        model: its name.
        machine: where the load was made, and the simulation's costs were measured.
        workload: the load.
        settings: how the model is served, in words.
        limits: what counts as goodput; None doesn't count it.
        runs: of the load, one or both kinds.
        costs: of the simulation's steps; None without one.
    """

    model: str
    machine: Machine
    workload: WorkloadOptions
    settings: str
    limits: Limits | None
    runs: list[ServingRun]
    costs: StepCosts | None = None

    def run(self, target: str) -> ServingRun | None:
        """Return the run on a target; None if there was none."""
        return next((run for run in self.runs if run.target == target), None)


def serving_run(target: str, results: Sequence[RequestResult], limits: Limits | None) -> ServingRun:
    """Return a run with its figures."""
    return ServingRun(target=target, metrics=summarise(results, limits), requests=list(results))


def median_ratios(report: ServingReport) -> dict[str, float]:
    """Return the simulation's medians divided by the server's, by measure.

    Measures that one of them lacks are left out; so are all without both runs.
    """
    served, simulated = report.run(SERVER), report.run(SIMULATED)
    if served is None or simulated is None:
        return {}
    found = {}
    for name in Latency.__struct_fields__:
        measured = getattr(served.metrics.latency, name)
        predicted = getattr(simulated.metrics.latency, name)
        if measured is not None and predicted is not None and measured.p50:
            found[name] = predicted.p50 / measured.p50
    return found


def serving_tables(report: ServingReport) -> list[ResultTable]:
    """Return the tables: latencies, throughput and fairness, and how far the simulation is off."""
    tables = [_latencies(report), _throughput(report)]
    if ratios := median_ratios(report):
        tables.append(_check(ratios, report))
    return tables


_LATENCY_LEGEND = (
    "Milliseconds. TTFT: from sending a request to its first token; TPOT: per token after it; ITL:"
    " between two messages with tokens; E2EL: to the end of the answer."
)


def _latencies(report: ServingReport) -> ResultTable:
    rows = []
    for run in report.runs:
        kinds = {"all": run.metrics.latency, **run.metrics.by_kind}
        for kind, latency in kinds.items():
            for name, spread in _spreads(latency):
                rows.append({"run on": run.target, "requests": kind, "": name, **_cells(spread)})
        if run.metrics.programs is not None:
            rows.append(
                {
                    "run on": run.target,
                    "requests": "programs",
                    "": "whole",
                    **_cells(run.metrics.programs),
                }
            )
    return ResultTable(
        title=f"{report.workload.workload}: latency", rows=rows, labels=3, caption=_LATENCY_LEGEND
    )


def _spreads(latency: Latency) -> Iterator[tuple[str, Spread | None]]:
    for name in Latency.__struct_fields__:
        yield name.upper(), getattr(latency, name)


def _cells(spread: Spread | None) -> dict[str, str]:
    names = ("mean", "p50", "p90", "p95", "p99")
    if spread is None:
        return dict.fromkeys(names, "-")
    return {name: _milliseconds(getattr(spread, name)) for name in names}


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def _throughput(report: ServingReport) -> ResultTable:
    rows = [_throughput_row(run) for run in report.runs]
    caption = _load_caption(report)
    return ResultTable(
        title=f"{report.workload.workload}: throughput and fairness", rows=rows, caption=caption
    )


def _throughput_row(run: ServingRun) -> dict[str, str]:
    metrics, fair = run.metrics, run.metrics.fairness
    late = metrics.lateness
    return {
        "run on": run.target,
        "complete": f"{metrics.completed:,} of {metrics.requests:,}",
        "requests/s": f"{metrics.request_throughput:.2f}",
        "tokens/s": f"{metrics.output_throughput:.1f}",
        "goodput/s": "-" if metrics.goodput is None else f"{metrics.goodput:.2f}",
        "good": "-" if metrics.good_share is None else f"{metrics.good_share:.0%}",
        "cached": f"{metrics.cached_share:.0%}",
        "Jain": "-" if fair is None else f"{fair.jain:.3f}",
        "TTFT max/min": "-" if fair is None else f"{fair.ttft_ratio:.2f}x",
        "sent late p99": "-" if late is None else f"{_milliseconds(late.p99)} ms",
        "failures": _failures(metrics),
    }


def _failures(metrics: ServingMetrics) -> str:
    listed = (f"{count:,} {status}" for status, count in sorted(metrics.failures.items()))
    return ", ".join(listed) or "none"


def _load_caption(report: ServingReport) -> str:
    load = report.workload
    arrivals = (
        "Poisson arrivals" if load.burstiness == 1 else f"gamma arrivals, shape {load.burstiness:g}"
    )
    goodput = f" Goodput: {report.limits} (ms)." if report.limits is not None else ""
    costs = ""
    if report.costs is not None:
        costs = (
            f" Simulated with steps measured on {report.costs.machine}; fitted times are off by"
            f" {report.costs.error:.0%} (median)."
        )
        if report.costs.drift != 1.0:
            costs += (
                " They are means of measurements before and after the server's run; a step took"
                f" {report.costs.drift:.2f} times as long in the later one."
            )
    return (
        f"{report.model}, {report.settings}; {load.request_rate:g} requests/s on average,"
        f" {arrivals}, {load.users} users, {load.tenants} tenants, answers of {load.output_tokens}"
        f" tokens, seed {load.seed}. Cached: share of the prompts' tokens. Jain: index of the"
        f" tenants' service until the last arrival, 1 is even; TTFT max/min: ratio of their highest"
        f" and lowest median.{goodput} {report.machine}.{costs}"
    )


def _check(ratios: dict[str, float], report: ServingReport) -> ResultTable:
    served, simulated = report.run(SERVER), report.run(SIMULATED)
    assert served is not None
    assert simulated is not None
    rows = [
        {
            "median": name.upper(),
            "server ms": _milliseconds(getattr(served.metrics.latency, name).p50),
            "simulated ms": _milliseconds(getattr(simulated.metrics.latency, name).p50),
            "simulated / server": f"{ratio:.2f}x",
        }
        for name, ratio in ratios.items()
    ]
    return ResultTable(
        title="The simulation beside the server",
        rows=rows,
        caption="The same requests, sent to the server and simulated.",
    )
