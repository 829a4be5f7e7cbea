"""Schedulers beside each other, on loads that each of them was made for.

Loads are those of ``midfill bench serving``, at a share of what the baseline can answer,
and figures are means over seeds. Without ``--real`` the engine is simulated: steps only take their
time, by costs that are measured or read from a file. With it, a server is started for each row.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import msgspec
import typer

from benchmarks.report import publish
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.scheduling.registry import POLICIES
from midfill.engine.scheduling.scheduler import SchedulerPolicy, ScheduleState, StepPlan
from midfill.engine.sequences.sequence import Sequence as EngineSequence
from midfill.errors import OptionError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill_lab.bench.serving.batch_layout import LayoutName
from midfill_lab.bench.serving.measure import ServingPlan, measure_serving
from midfill_lab.bench.serving.measure import step_costs as measure_costs_once
from midfill_lab.bench.serving.metrics import Limits, ServingMetrics, Spread
from midfill_lab.bench.serving.report import SERVER, SIMULATED
from midfill_lab.bench.serving.simulation import SimulatedModel, VirtualClock, simulate_load
from midfill_lab.bench.serving.step_costs import StepCosts, read_costs
from midfill_lab.bench.serving.workload import WorkloadOptions
from midfill_lab.bench.serving.workloads import make_requests
from midfill_lab.cli.bench.options import JsonOption, LoadedModelOption
from midfill_lab.cli.outputs import DocsOption, writable
from midfill_lab.reporting import ResultTable

_BASELINE = "sarathi-serve"
"""First come, first served."""
_PLANNED = 200  # sequences


@dataclass(frozen=True)
class Row:
    """A way of serving a load.

    Attributes:
        scheduler: its specification.
        layout: of simulated steps; a server has only "ragged".
        utilisation: requests per second, as a multiple of what the baseline can answer; None takes
            the comparison's.
    """

    scheduler: str
    layout: LayoutName = "ragged"
    utilisation: float | None = None

    def __str__(self) -> str:
        """Return what the row is called."""
        name = f"`{self.scheduler}`"
        if self.layout != "ragged":
            name += f", {self.layout}"
        return name if self.utilisation is None else f"{name} at {self.utilisation:g}"


@dataclass(frozen=True)
class Comparison:
    """Schedulers on one load.

    Attributes:
        title: of the table.
        load: what is sent; its rate is set by ``utilisation``.
        utilisation: requests per second, as a multiple of what the baseline can answer.
        rows: the schedulers.
        columns: names of ``_COLUMNS``.
        pool: tokens that the KV pool holds; None leaves the default.
        deadline: after which clients give up, as the time in which the baseline answers so many
            requests; None waits for ever.
    """

    title: str
    load: WorkloadOptions
    utilisation: float
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    pool: int | None = None
    deadline: float | None = None


def _rows(*schedulers: str) -> tuple[Row, ...]:
    return tuple(map(Row, schedulers))


_BATCHING = (
    _BASELINE,
    "sarathi-serve:short_share=0",
    "shortest-first",
    "sarathi-serve:gap=0.05",
    "sarathi-serve:gap=0.2",
    "dynamic-chunks",
    "sarathi",
    "nexus",
    "nexus+shortest-first",
    "nexus:share=20",
    "nexus:share=50",
    "prefill-first",
    "iteration-level",
    "request-level",
)
_OVERLOAD = (0.5, 0.75, 1.0, 1.5, 2.0)

COMPARISONS = {
    "gaps": Comparison(
        "Long documents beside chats",
        WorkloadOptions(workload="mixed", requests=120, output_tokens=32, characters=2000),
        0.7,
        _rows(*_BATCHING),
        ("ttft mean", "ttft p95", "itl p50", "itl p99", "tokens/s"),
    ),
    "padding": Comparison(
        "Prompts of different lengths that arrive in bursts",
        WorkloadOptions(
            workload="mixed", requests=100, output_tokens=8, characters=2000, burstiness=0.1
        ),
        0.7,
        (
            Row("request-level", "padded"),
            Row("request-level+shortest-first:ageing=0", "padded"),
            Row("request-level", "packed"),
            Row("request-level"),
            Row("prefill-first", "padded"),
            Row("prefill-first+shortest-first:ageing=0", "padded"),
            Row("prefill-first", "packed"),
            Row("prefill-first"),
            Row(_BASELINE),
        ),
        ("ttft mean", "ttft p95", "seconds", "tokens/s"),
    ),
    "deadlines": Comparison(
        "Clients that give up",
        WorkloadOptions(workload="mixed", requests=200, output_tokens=16, characters=1500),
        1.0,
        tuple(
            Row(scheduler, utilisation=utilisation)
            for scheduler in (_BASELINE, "edf")
            for utilisation in _OVERLOAD
        ),
        ("in time/s", "in time", "failures"),
        deadline=20.0,
    ),
    "agents": Comparison(
        "Agents that call tools, with KV for about six of them",
        WorkloadOptions(
            workload="agents", requests=180, turns=6, output_tokens=32, characters=3000, pause=1.0
        ),
        2.0,
        _rows(_BASELINE, "continuum", "continuum:threshold=2", "longest-prefix", "shortest-first"),
        ("program mean", "program p95", "ttft mean", "cached"),
        pool=9000,
    ),
    "editing": Comparison(
        "Editors",
        WorkloadOptions(workload="editing", requests=240, users=16, output_tokens=24),
        0.8,
        _rows(
            _BASELINE, "sarathi-serve:short_share=0", "sarathi-serve:gap=0.05", "shortest-first",
            "longest-prefix", "hit-rate", "nexus", "layered-prefill", "prefill-first",
            "request-level",
        )
        + tuple(
            Row(scheduler, utilisation=utilisation)
            for utilisation in (0.2, 0.4, 0.6)
            for scheduler in (_BASELINE, "shortest-first")
        ),
        ("ttft p50", "ttft p95", "itl p99", "e2el mean", "good"),
    ),
}  # fmt: skip
"""The comparisons, by name."""

_LIMITS = Limits(ttft=0.3, itl=0.1)

_COLUMNS: dict[str, Callable[[ServingMetrics], float]] = {
    "ttft mean": lambda metrics: _of(metrics.latency.ttft, "mean"),
    "ttft p50": lambda metrics: _of(metrics.latency.ttft, "p50"),
    "ttft p95": lambda metrics: _of(metrics.latency.ttft, "p95"),
    "itl p50": lambda metrics: _of(metrics.latency.itl, "p50"),
    "itl p99": lambda metrics: _of(metrics.latency.itl, "p99"),
    "e2el mean": lambda metrics: _of(metrics.latency.e2el, "mean"),
    "program mean": lambda metrics: _of(metrics.programs, "mean"),
    "program p95": lambda metrics: _of(metrics.programs, "p95"),
    "seconds": lambda metrics: metrics.seconds,
    "tokens/s": lambda metrics: metrics.output_throughput,
    "in time/s": lambda metrics: metrics.request_throughput,
    "in time": lambda metrics: metrics.completed / metrics.requests,
    "failures": lambda metrics: sum(metrics.failures.values()),
    "cached": lambda metrics: metrics.cached_share,
    "good": lambda metrics: metrics.good_share or 0.0,
}
_SHARES = ("in time", "cached", "good")
_PLAIN = ("tokens/s", "in time/s", "failures")


class RowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one row came to.

    Attributes:
        comparison, row: what was run.
        rates: requests per second, by seed.
        figures: by column, one per seed.
    """

    comparison: str
    row: str
    rates: list[float]
    figures: dict[str, list[float]]


class PlanningFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How long planning takes beside the step that it plans.

    Attributes:
        scheduler: whose.
        plan_seconds: of a plan, median.
        step_seconds: of the steps, median.
    """

    scheduler: str
    plan_seconds: float
    step_seconds: float


class SchedulersReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        costs: of the steps.
        is_real: whether servers were started, or the engine was simulated.
        seeds: of the loads.
        rows: of all comparisons.
        planning: by scheduler; empty where it wasn't measured.
    """

    costs: StepCosts
    is_real: bool
    seeds: int
    rows: list[RowFigures]
    planning: list[PlanningFigures]


def measure_rows(
    model: str,
    costs: Path,
    names: Sequence[str],
    *,
    seeds: int = 3,
    is_real: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[RowFigures]:
    """Yield the figures of each row of some comparisons.

    Args:
        model: what is served.
        costs: file of what steps cost.
        names: of the comparisons.
        seeds: how many loads of each kind.
        is_real: see ``SchedulersReport``.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be served.
    """
    for name in names:
        comparison = COMPARISONS[name]
        loads = [msgspec.structs.replace(comparison.load, seed=seed) for seed in range(seeds)]
        capacities = [_capacity(model, costs, comparison, load) for load in loads]
        for row in comparison.rows:
            if is_real and row.layout != "ragged":
                continue
            progress(f"{name}: {row}")
            plans = [
                _plan(model, costs, comparison, row, load, capacity, is_real)
                for load, capacity in zip(loads, capacities, strict=True)
            ]
            runs = [measure_serving(plan).runs[0].metrics for plan in plans]
            yield RowFigures(
                comparison=name,
                row=str(row),
                rates=[plan.workload.request_rate for plan in plans],
                figures={
                    column: [_COLUMNS[column](metrics) for metrics in runs]
                    for column in comparison.columns
                },
            )


def _capacity(model: str, costs: Path, comparison: Comparison, load: WorkloadOptions) -> float:
    """Return how many requests per second the baseline answers, if all are there at once."""
    at_once = msgspec.structs.replace(load, pause=0.0)
    without = replace(comparison, deadline=None)
    row = Row(_BASELINE, utilisation=math.inf)
    plan = _plan(model, costs, without, row, at_once, 1.0, is_real=False)
    return measure_serving(plan).runs[0].metrics.request_throughput


def _plan(
    model: str,
    costs: Path,
    comparison: Comparison,
    row: Row,
    load: WorkloadOptions,
    capacity: float,
    is_real: bool,
) -> ServingPlan:
    """Return one run of a row.

    Args:
        model, costs, is_real: see ``measure_rows``.
        comparison: that the row is of.
        row: the row.
        load: with its seed.
        capacity: requests per second that the baseline can answer.
    """
    multiple = comparison.utilisation if row.utilisation is None else row.utilisation
    deadline = None if comparison.deadline is None else comparison.deadline / capacity
    pool = comparison.pool
    options = ModelOptions(
        scheduler=row.scheduler,
        speculation=False,
        kv_memory=None if pool is None else pool * read_costs(costs).slot_bytes,
    )
    return ServingPlan(
        workload=msgspec.structs.replace(load, request_rate=multiple * capacity, deadline=deadline),
        served=ServeOptions(model=model, options=options, stream_interval=0.0),
        runs=(SERVER if is_real else SIMULATED,),
        limits=_LIMITS,
        costs=costs,
        layout=row.layout,
    )


class TimedPolicy:
    """A policy that notes how long its plans take, and the steps, of so many sequences."""

    def __init__(self, policy: SchedulerPolicy, sequences: int) -> None:
        self._policy, self._sequences = policy, sequences
        self._last: float | None = None
        self.plans: list[float] = []
        self.steps: list[float] = []

    def plan(self, state: ScheduleState) -> StepPlan:
        """See ``SchedulerPolicy``."""
        started = time.perf_counter()
        plan = self._policy.plan(state)
        seconds = time.perf_counter() - started
        if self._last is not None:
            self.steps.append(state.now - self._last)
            self._last = None
        if len(state.running) + len(state.waiting) >= self._sequences:
            self.plans.append(seconds)
            self._last = state.now
        return plan


class _TimedModel(SimulatedModel):
    """A simulated model whose engine's plans are timed."""

    def engine(self, clock: VirtualClock, tool_of: Callable[[EngineSequence], str]) -> Engine:
        """See ``SimulatedModel.engine``."""
        engine = super().engine(clock, tool_of)
        self.policy = engine._policy = TimedPolicy(engine._policy, _PLANNED)
        return engine


def measure_planning(model: str, costs: StepCosts, scheduler: str) -> PlanningFigures:
    """Time a scheduler's plans where many sequences run, and more wait.

    Args:
        model: what is served.
        costs: of its steps.
        scheduler: a specification.
    """
    options = ModelOptions(scheduler=scheduler, speculation=False, max_running=_PLANNED)
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), options.weights)
    timed = _TimedModel(checkpoint, costs, ServeOptions(model=model, options=options))
    load = WorkloadOptions(
        workload="mixed", requests=3 * _PLANNED // 2, characters=400, output_tokens=150,
        request_rate=math.inf,
    )  # fmt: skip
    simulate_load(timed, make_requests(load))
    return PlanningFigures(
        scheduler=scheduler,
        plan_seconds=median(timed.policy.plans),
        step_seconds=median(timed.policy.steps),
    )


def scheduler_tables(report: SchedulersReport) -> list[ResultTable]:
    """Return a table per comparison, and one of planning."""
    tables = []
    for name, comparison in COMPARISONS.items():
        rows = [row for row in report.rows if row.comparison == name]
        if rows:
            caption = _caption(comparison, report, rows)
            cells = [
                {"scheduler": row.row, **{c: _cell(c, row.figures[c]) for c in row.figures}}
                for row in rows
            ]
            tables.append(
                ResultTable(rows=cells, title=comparison.title, titled=True, caption=caption)
            )
    if report.planning:
        tables.append(_planning_table(report))
    return tables


def _planning_table(report: SchedulersReport) -> ResultTable:
    return ResultTable(
        title=f"Planning with {_PLANNED} sequences",
        titled=True,
        rows=[
            {
                "scheduler": f"`{each.scheduler}`",
                "plan": f"{1000 * each.plan_seconds:.2f} ms",
                "step": f"{1000 * each.step_seconds:.0f} ms",
                "share": f"{each.plan_seconds / each.step_seconds:.1%}",
            }
            for each in report.planning
        ],
        caption=(
            f"Medians of steps with at least {_PLANNED} sequences; planning is timed on"
            f" {report.costs.machine}."
        ),
    )


def _caption(comparison: Comparison, report: SchedulersReport, rows: Sequence[RowFigures]) -> str:
    load, rates = comparison.load, rows[0].rates
    run_on = "A server for each row" if report.is_real else "Virtual clock"
    pool = "" if comparison.pool is None else f", a pool of {comparison.pool:,} tokens"
    good = f" Good: {_LIMITS} (ms)." if "good" in comparison.columns else ""
    return (
        f"Means over {report.seeds} seeds of {load.requests} requests, workload `{load.workload}`,"
        f" {load.characters:,} characters, answers of {load.output_tokens} tokens{pool};"
        f" {fmean(rates):.2f} requests/s in the first row. Milliseconds where no unit is given."
        f"{good} {run_on}; {report.costs.model}, {report.costs.engine}, step costs measured on"
        f" {report.costs.machine}."
    )


def _cell(column: str, values: Sequence[float]) -> str:
    mean = fmean(values)
    if column in _SHARES:
        return f"{mean:.0%}"
    if column in _PLAIN:
        return f"{mean:.2f}" if mean < 10 else f"{mean:.0f}"
    if column == "seconds":
        return f"{mean:.1f} s"
    return f"{1000 * mean:,.0f}" if mean >= 0.1 else f"{1000 * mean:.1f}"


def _of(spread: Spread | None, name: str) -> float:
    """Return one figure of some times, in seconds."""
    return math.nan if spread is None else float(getattr(spread, name))


def schedulers(
    step_costs: Annotated[
        Path,
        typer.Option(
            callback=writable,
            help="Costs of simulated steps; measured first, and written there, if there is no such"
            " file.",
        ),
    ],
    model: LoadedModelOption = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Comparisons to run: {', '.join(COMPARISONS)}.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Loads of each kind.")] = 3,
    real: Annotated[
        bool, typer.Option("--real", help="Start a server for each row instead of simulating it.")
    ] = False,
    planning: Annotated[bool, typer.Option(help="Time the plans, too.")] = True,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Compare schedulers on loads that each of them was made for."""
    names = list(COMPARISONS) if only is None else only
    if unknown := sorted(set(names) - set(COMPARISONS)):
        raise OptionError(f"--only {unknown[0]}: there are {', '.join(COMPARISONS)}")
    with show_steps("loading") as progress:
        name = model or DEFAULT_MODEL
        served = ServeOptions(model=name)
        costs = measure_costs_once(
            ServingPlan(workload=WorkloadOptions(), served=served, costs=step_costs), progress
        )
        rows = measure_rows(name, step_costs, names, seeds=seeds, is_real=real, progress=progress)
        report = SchedulersReport(
            costs=costs,
            is_real=real,
            seeds=seeds,
            rows=list(rows),
            planning=[
                measure_planning(name, costs, policy) for policy in (POLICIES if planning else ())
            ],
        )
    publish(report, *scheduler_tables(report), section="schedulers", json=json, docs=docs)
