"""DistServe on this machine: a prefill and a decode worker, measured and simulated, and one engine.

The workers are two engine processes of one thread each, pinned to a core each where the system
allows it; the engine that does both has two threads. All get the same requests at the same times.
What the simulator knows of the workers is measured before (``costs``), at other sizes.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Annotated

import msgspec
import typer

from benchmarks.disaggregation.costs import Costs, MeasuredCosts, measure_costs
from benchmarks.disaggregation.latency import DecodeCost, DecodeLatency, PrefillLatency
from benchmarks.disaggregation.placement import Placement, PlacementSearch
from benchmarks.disaggregation.simulated_workers import DecodeWorker, PrefillWorker
from benchmarks.disaggregation.workload import (
    Arrival,
    DisaggregationLoad,
    LoadResult,
    Served,
    Submits,
    Targets,
    attainment,
    poisson_arrivals,
    serve,
)
from benchmarks.report import publish
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.disaggregated.engine import DisaggregatedEngine
from midfill.engine.disaggregated.workers import Pool
from midfill.engine.process.client import EngineClient
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.system.machine import Machine, describe_machine
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_NO_TIME = DecodeCost(0.0, 0.0, 0.0)
_TIMES = (1, 2, 4, 8)
"""Multiples of the rate for which workers are looked for."""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's requests were served.

    Attributes:
        ttft, tpot: means in seconds.
        p99_gap: seconds between two outputs of an answer; None if simulated.
        attainment: share of requests that met both targets.
        busy: share of the time that the prefill and the decode worker compute; None of one engine.
    """

    ttft: float
    tpot: float
    p99_gap: float | None
    attainment: float
    busy: tuple[float, float] | None = None


class DisaggregationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        rate: requests per second.
        ttft_target, tpot_target: seconds.
        prefill_error, decode_error: largest relative error of the fitted latencies on sizes that
            they were not fitted to.
        prefill_slowdown, decode_slowdown: how many times as long a prefill and a step take while
            the other worker is busy.
        transfer_seconds: mean time to move a prompt's KV.
        runs: figures by what served the requests.
        placements: workers for this rate and multiples of it, at the costs that were measured.
    """

    model: str
    machine: Machine
    load: DisaggregationLoad
    rate: float
    ttft_target: float
    tpot_target: float
    prefill_error: float
    decode_error: float
    prefill_slowdown: float
    decode_slowdown: float
    transfer_seconds: float
    runs: dict[str, RunFigures]
    placements: list[Placement]


def measure_disaggregation(
    model: str, load: DisaggregationLoad, progress: Callable[[str], None] = lambda _: None
) -> DisaggregationReport:
    """Start the workers, measure what they cost, and run the load on all.

    Raises:
        MidfillError: the model can't be found or loaded.
    """
    return asyncio.run(_measure(model, load, progress))


async def _measure(
    model: str, load: DisaggregationLoad, progress: Callable[[str], None]
) -> DisaggregationReport:
    path, adapter = resolve(model), resolve_adapter(model, None)
    longest = max(load.prompts) + max(load.outputs)
    options = ModelOptions(
        threads=1,
        adapter=None if adapter is None else str(adapter),
        token_budget=longest,
        speculation=False,
    )
    progress("loading the workers")
    async with (
        _engine(path, options, core=0) as prefiller,
        _engine(path, options, core=1) as decoder,
    ):
        prefill, decode = _workers(prefiller, decoder)
        engine = DisaggregatedEngine([(prefiller, prefill)], [(decoder, decode)])
        costs = await measure_costs(engine, prefiller, decoder, load, progress)
        plan = _Plan(load, costs, prefill, decode)
        engine.transferred_bytes, engine.transfer_seconds = 0, 0.0
        busy = _Busy(prefiller, decoder)
        result = await _run(engine, plan, MEASURED, progress)
        shares = busy.shares(result.seconds)
    runs = {
        MEASURED: _figures(result.served, result.gaps, plan.targets, shares),
        SIMULATED: _figures(
            plan.simulated.served, None, plan.targets,
            (plan.simulated.prefill_busy, plan.simulated.decode_busy),
        ),
    }  # fmt: skip
    for name, budget in ((WHOLE, 16 * longest), (CHUNKED, ModelOptions().step_tokens)):
        both = msgspec.structs.replace(options, threads=2, token_budget=budget)
        async with _engine(path, both, core=None) as single:
            result = await _run(single, plan, name, progress)
        runs[name] = _figures(result.served, result.gaps, plan.targets, None)
    moved = max(1, sum(each.lengths.output > 1 for each in plan.arrivals))
    return DisaggregationReport(
        model=model,
        machine=describe_machine(),
        load=load,
        rate=plan.rate,
        ttft_target=plan.targets.ttft,
        tpot_target=plan.targets.tpot,
        prefill_error=costs.prefill_error,
        decode_error=costs.decode_error,
        prefill_slowdown=plan.slowdown(lambda each: each.prefill.seconds([longest])),
        decode_slowdown=plan.slowdown(lambda each: each.decode.seconds(2, 2 * longest)),
        transfer_seconds=engine.transfer_seconds / moved,
        runs=runs,
        placements=plan.placements(),
    )


class _Plan:
    """What is run: requests at a rate at which the queues stay short, and their targets.

    Args:
        load: the load.
        measured: what the workers cost.
        prefill, decode: the workers.
    """

    def __init__(
        self,
        load: DisaggregationLoad,
        measured: MeasuredCosts,
        prefill: PrefillWorker,
        decode: DecodeWorker,
    ) -> None:
        self._measured = measured
        self.load = load
        busy = measured.idle.between(measured.busy, load.utilisation, load.utilisation)
        prompts = [each.prompt for each in load.lengths]
        mean_prefill = mean(busy.prefill.seconds([prompt]) for prompt in prompts)
        read = busy.transfer.read_share * busy.transfer.seconds(round(mean(prompts)))
        self.rate = load.utilisation / (mean_prefill + read)
        step = busy.decode.seconds(2, 2 * round(mean(prompts)))
        self.targets = Targets(load.patience[0] * mean_prefill, load.patience[1] * step)
        self.arrivals: list[Arrival] = poisson_arrivals(
            load.lengths, self.rate, load.requests, load.seed
        )
        self.simulated, self._costs = measured.simulate(self.arrivals, prefill, decode)
        self._workers = prefill, decode

    def placements(self) -> list[Placement]:
        """Return the workers for this rate and multiples of it, each with cores of its own."""
        prefill, decode = self._workers
        search = PlacementSearch(
            prefill=replace(prefill, latency=self._costs.prefill),
            decode=replace(decode, latency=self._costs.decode),
            transfer=self._costs.transfer,
            lengths=self.load.lengths,
            targets=self.targets,
            seed=self.load.seed,
            requests=self.load.simulated,
        )
        return [search.place(times * self.rate) for times in _TIMES]

    def slowdown(self, seconds: Callable[[Costs], float]) -> float:
        """Return how many times as long something takes while the other worker is busy."""
        return seconds(self._measured.busy) / seconds(self._measured.idle)


class _Busy:
    """How busy two workers are from now on."""

    def __init__(self, prefiller: EngineClient, decoder: EngineClient) -> None:
        self._workers = (prefiller, decoder)
        self._before = [worker.stats.busy_seconds for worker in self._workers]

    def shares(self, seconds: float) -> tuple[float, float]:
        """Return the share of so many seconds that each has computed."""
        prefiller, decoder = (
            (worker.stats.busy_seconds - before) / seconds
            for worker, before in zip(self._workers, self._before, strict=True)
        )
        return prefiller, decoder


async def _run(
    engine: Submits, plan: _Plan, name: str, progress: Callable[[str], None]
) -> LoadResult:
    """Run the load once, and tell every tenth of it."""
    count, tenth = len(plan.arrivals), max(1, len(plan.arrivals) // 10)
    progress(f"{name}: {count} requests")

    def ended(number: int) -> None:
        if number % tenth == 0:
            progress(f"{name}: {number} of {count} requests")

    return await serve(engine, plan.arrivals, plan.load.seed, ended)


@contextlib.asynccontextmanager
async def _engine(
    path: Path, options: ModelOptions, core: int | None
) -> AsyncIterator[EngineClient]:
    """Run an engine process, on one core if that is given and possible."""
    client = EngineClient(path, options)
    try:
        await client.start()
        if core is not None and client.process_id is not None:
            _pin(client.process_id, core)
        yield client
    finally:
        await client.close()


def _pin(process: int, core: int) -> None:
    """Let a process use one core, where the system knows of that."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[core % len(cores)]})


def _workers(prefiller: EngineClient, decoder: EngineClient) -> tuple[PrefillWorker, DecodeWorker]:
    """Return the workers' limits; their latencies are not known yet."""
    assert prefiller.info is not None
    assert decoder.info is not None
    prefill = PrefillWorker(
        latency=PrefillLatency(0.0, 0.0, 0.0),
        pool=Pool(pages=prefiller.info.slots, page_tokens=1),
        saturating_tokens=1,  # a core is busy with any prompt: they run one by one
    )
    decode = DecodeWorker(
        latency=DecodeLatency(_NO_TIME, _NO_TIME, 1),
        pool=Pool(pages=decoder.info.slots, page_tokens=1),
        max_batch=decoder.info.max_running,
    )
    return prefill, decode


def _figures(
    served: Sequence[Served],
    gaps: list[float] | None,
    targets: Targets,
    busy: tuple[float, float] | None,
) -> RunFigures:
    tpots = [each.tpot for each in served if each.arrival.lengths.output > 1]
    return RunFigures(
        ttft=mean(each.ttft for each in served),
        tpot=mean(tpots) if tpots else 0.0,
        p99_gap=quantiles(gaps, n=100)[-1] if gaps and len(gaps) > 1 else None,
        attainment=attainment(served, targets),
        busy=busy,
    )


MEASURED, SIMULATED = "two workers", "two workers, simulated"
WHOLE, CHUNKED = "one engine, whole prompts", "one engine, chunks"


def disaggregation_table(report: DisaggregationReport) -> ResultTable:
    """Return a row for each way of serving."""
    rows = [
        {
            "": name,
            "mean TTFT, ms": f"{1000 * run.ttft:,.0f}",
            "mean TPOT, ms": f"{1000 * run.tpot:.1f}",
            "P99 gap, ms": "" if run.p99_gap is None else f"{1000 * run.p99_gap:,.0f}",
            "targets met": f"{run.attainment:.0%}",
            "busy": "" if run.busy is None else " / ".join(f"{share:.0%}" for share in run.busy),
        }
        for name, run in report.runs.items()
    ]
    return ResultTable(rows=rows, title="Prefill and decode apart", caption=_caption(report))


def placement_table(report: DisaggregationReport) -> ResultTable:
    """Return a row for each rate."""
    first = report.placements[0]
    rows = [
        {
            "requests/s": f"{found.rate:.2f}",
            "prefill workers": str(found.prefill),
            "decode workers": str(found.decode),
            "targets met": f"{found.attainment:.0%}",
        }
        for found in report.placements
    ]
    return ResultTable(
        rows=rows,
        title="Workers by DistServe's search",
        caption="Simulated at the costs above, each worker with a core of its own: the fewest that"
        " were found to keep both targets for nine requests in ten. Alone, a prefill worker keeps"
        f" the first target up to {first.prefill_goodput:.1f} requests/s, a decode worker the"
        f" second up to {first.decode_goodput:.1f}.",
    )


def _caption(report: DisaggregationReport) -> str:
    load, runs = report.load, report.runs
    real, simulated = runs[MEASURED], runs[SIMULATED]
    points = 100 * (simulated.attainment - real.attainment)
    return (
        f"{report.model}; {load.requests} requests at {report.rate:.2f} per second, prompts of"
        f" {min(load.prompts)} to {max(load.prompts)} tokens, answers of {min(load.outputs)} to"
        f" {max(load.outputs)}. Targets: {1000 * report.ttft_target:,.0f} ms to the first token,"
        f" {1000 * report.tpot_target:.1f} ms per further token. Busy: the prefill and the decode"
        f" worker's share of the time. The simulation is off by"
        f" {simulated.ttft / real.ttft - 1:+.0%} in TTFT, {simulated.tpot / real.tpot - 1:+.0%} in"
        f" TPOT and {points:+.0f} points in targets met. It assumes that times depend on sizes as"
        f" fitted (off by {report.prefill_error:.0%} for a prefill and {report.decode_error:.0%}"
        f" for a step at sizes that were not fitted); that a busy worker slows the other one down"
        f" as measured (a prefill takes {report.prefill_slowdown:.2f} times as long, a step"
        f" {report.decode_slowdown:.2f} times), by the share of the time that it is busy on"
        f" average; and that KV moves one prompt at a time"
        f" ({1000 * report.transfer_seconds:.1f} ms on average), which holds up the next prompt"
        f" but no step. On {report.machine}."
    )


LoadedArgument = Annotated[
    str | None, typer.Argument(help="The model; the default model if not set.")
]


def disaggregation(
    model: LoadedArgument = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each run.")] = 150,
    utilisation: Annotated[
        float, typer.Option(min=0.05, max=2.0, help="Of the prefill worker; the rate follows.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure a prefill and a decode worker beside DistServe's simulator and one engine."""
    load = DisaggregationLoad(requests=requests, utilisation=utilisation, seed=seed)
    with show_steps("loading") as progress:
        report = measure_disaggregation(model or DEFAULT_MODEL, load, progress)
    tables = disaggregation_table(report), placement_table(report)
    publish(report, *tables, section="disaggregation", json=json, docs=docs)
