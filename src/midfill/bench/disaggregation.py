"""DistServe on this machine: a prefill and a decode worker, measured and simulated, and one engine.

The workers are two engine processes of one thread each, pinned to a core each where the system
allows it; the engine that does both has two threads. All get the same requests at the same times.
What the simulator knows of the workers is fitted to times measured before: of prefills and decode
steps of other sizes than those that the fit is checked with, and of transfers.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles

import msgspec

from midfill.checkpoints.model_store import resolve, resolve_adapter
from midfill.config import ModelOptions
from midfill.disaggregation.latency import (
    DecodeLatency,
    DecodeSample,
    PrefillLatency,
    PrefillSample,
    fit_decode,
    fit_prefill,
)
from midfill.disaggregation.simulator import Deployment, Transfer, simulate
from midfill.disaggregation.workers import DecodeWorker, Pool, PrefillWorker
from midfill.disaggregation.workload import (
    Arrival,
    Lengths,
    Served,
    Targets,
    attainment,
    poisson_arrivals,
)
from midfill.engine.client import EngineClient
from midfill.engine.disaggregated import DisaggregatedEngine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.engine.worker_queues import WorkerEngine
from midfill.reporting.result_table import ResultTable
from midfill.system.machine import Machine, describe_machine

MEASURED, SIMULATED = "two workers", "two workers, simulated"
WHOLE, CHUNKED = "one engine, whole prompts", "one engine, chunks"
_DECODED = 24  # tokens of an answer whose steps are measured
_TRIES = 3
_THRESHOLD = 4  # sequences, where a batch's costs change
_FIRST_TOKEN_ID = 50  # beyond bytes and special tokens in most vocabularies


class DisaggregationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        prompts, outputs: tokens of requests; each is drawn from these.
        requests: of each run.
        utilisation: of the prefill worker; the rate follows from it.
        seed: of lengths and arrivals.
        patience: targets as multiples of the mean prefill, and of the mean decode step.
    """

    prompts: tuple[int, ...] = (64, 128, 256, 384)
    outputs: tuple[int, ...] = (8, 16, 32)
    requests: int = 60
    utilisation: float = 0.6
    seed: int = 0
    patience: tuple[float, float] = (3.0, 1.5)


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's requests were served.

    Attributes:
        ttft, tpot: means in seconds.
        p99_gap: seconds between two outputs of an answer; None if simulated.
        attainment: share of requests that met both targets.
    """

    ttft: float
    tpot: float
    p99_gap: float | None
    attainment: float


class DisaggregationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        rate: requests per second.
        ttft_target, tpot_target: seconds.
        prefill_error, decode_error: largest relative error of the fitted latencies on sizes that
            they were not fitted to.
        transfer_seconds: mean time to move a prompt's KV.
        runs: figures by what served the requests.
    """

    model: str
    machine: Machine
    load: DisaggregationLoad
    rate: float
    ttft_target: float
    tpot_target: float
    prefill_error: float
    decode_error: float
    transfer_seconds: float
    runs: dict[str, RunFigures]


class _Costs(msgspec.Struct, frozen=True):
    """What the simulator knows."""

    prefill: PrefillLatency
    decode: DecodeLatency
    transfer: Transfer
    prefill_error: float
    decode_error: float


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
    path = resolve(model)
    longest = max(load.prompts) + max(load.outputs)
    adapter = resolve_adapter(model, None)
    options = ModelOptions(
        threads=1,
        adapter=None if adapter is None else str(adapter),
        token_budget=longest,
        speculation=False,
    )
    histories = [Lengths(prompt, output) for prompt in load.prompts for output in load.outputs]
    async with _engine(path, options, core=0) as one, _engine(path, options, core=1) as other:
        progress("measuring what prefills, decode steps and transfers cost")
        costs = await _costs(one, other, load)
        prefill, decode = _simulated_workers(one, other, costs)
        mean_prefill = mean(costs.prefill.seconds([each.prompt]) for each in histories)
        rate = load.utilisation / mean_prefill
        step = costs.decode.seconds(2, 2 * round(mean(load.prompts)))
        targets = Targets(load.patience[0] * mean_prefill, load.patience[1] * step)
        arrivals = poisson_arrivals(histories, rate, load.requests, load.seed)
        progress(f"{MEASURED}: {load.requests} requests")
        engine = DisaggregatedEngine([(one, prefill)], [(other, decode)])
        served, gaps = await _serve(engine, arrivals, load.seed)
        moved = max(1, sum(each.lengths.output > 1 for each in arrivals))
        runs = {MEASURED: _figures(served, gaps, targets)}
    simulated = simulate(arrivals, Deployment((prefill,), (decode,), costs.transfer))
    runs[SIMULATED] = _figures(simulated, None, targets)
    for name, budget in ((WHOLE, 16 * longest), (CHUNKED, ModelOptions().token_budget)):
        both = msgspec.structs.replace(options, threads=2, token_budget=budget)
        async with _engine(path, both, core=None) as single:
            progress(f"{name}: {load.requests} requests")
            served, gaps = await _serve(single, arrivals, load.seed)
        runs[name] = _figures(served, gaps, targets)
    return DisaggregationReport(
        model=model,
        machine=describe_machine(),
        load=load,
        rate=rate,
        ttft_target=targets.ttft,
        tpot_target=targets.tpot,
        prefill_error=costs.prefill_error,
        decode_error=costs.decode_error,
        transfer_seconds=engine.transfer_seconds / moved,
        runs=runs,
    )


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


# --- what the simulator is told ---


async def _costs(one: EngineClient, other: EngineClient, load: DisaggregationLoad) -> _Costs:
    rng = random.Random(load.seed)
    shortest, longest = min(load.prompts), max(load.prompts)
    sizes = [shortest, (shortest + longest) // 3, 2 * longest // 3, longest]
    prefills = [await _prefill_sample(one, size, rng) for size in sizes]
    prefill = fit_prefill(prefills)
    held_out = [await _prefill_sample(one, size, rng) for size in load.prompts[1:-1]]
    shapes = [(size, context) for size in (1, 2, 3, 4, 6, 8) for context in (shortest, longest)]
    decodes = [await _decode_sample(other, *shape, rng) for shape in shapes]
    decode = fit_decode(decodes, _THRESHOLD)
    others = [await _decode_sample(other, size, sizes[1], rng) for size in (2, 5)]
    return _Costs(
        prefill,
        decode,
        await _transfer(one, other, (shortest, longest), rng),
        max((_error(prefill.seconds(each.prompts), each.seconds) for each in held_out), default=0),
        max(
            _error(decode.seconds(len(each.contexts), sum(each.contexts)), each.seconds)
            for each in others
        ),
    )


def _error(expected: float, measured: float) -> float:
    return abs(expected - measured) / measured


async def _prefill_sample(client: EngineClient, tokens: int, rng: random.Random) -> PrefillSample:
    """Measure a prefill, the first token's way to this process included."""
    times = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        with client.submit(_request(_prompt(tokens, rng), 1)) as outputs:
            async for _ in outputs:
                pass
        times.append(time.perf_counter() - started)
    return PrefillSample((tokens,), median(times))


async def _decode_sample(
    client: EngineClient, sequences: int, context: int, rng: random.Random
) -> DecodeSample:
    """Measure a step of some sequences with about so many tokens each."""
    tries = [await _seconds_per_step(client, sequences, context, rng) for _ in range(_TRIES)]
    return DecodeSample((context + _DECODED // 2,) * sequences, median(tries))


async def _seconds_per_step(
    client: EngineClient, sequences: int, context: int, rng: random.Random
) -> float:
    """Return the mean, from when all sequences decode to when the first one ends."""
    requests = [_request(_prompt(context, rng), _DECODED + sequences) for _ in range(sequences)]
    arrived: dict[str, list[float]] = {each.request_id: [] for each in requests}
    with client.submit(*requests) as outputs:
        async for output in outputs:
            arrived[output.request_id] += [time.perf_counter()] * len(output.token_ids)
    together = max(times[0] for times in arrived.values())
    times = min(arrived.values(), key=lambda times: times[-1])
    steps = sum(each > together for each in times)
    return max(times[-1] - together, 1e-6) / max(steps, 1)


async def _transfer(
    one: EngineClient, other: EngineClient, sizes: tuple[int, int], rng: random.Random
) -> Transfer:
    """Measure transfers of two sizes."""
    times = []
    for tokens in sizes:
        tries = []
        for _ in range(_TRIES):
            request = _request(_prompt(tokens, rng), 1)
            with one.submit(request) as outputs:
                async for _ in outputs:
                    pass
            started = time.perf_counter()
            await other.import_kv("", await one.export_kv("", request.token_ids))
            tries.append(time.perf_counter() - started)
        times.append(median(tries))
    per_token = max(0.0, (times[1] - times[0]) / (sizes[1] - sizes[0]))
    constant = max(0.0, times[0] - per_token * sizes[0])
    return Transfer(per_token, constant, between_steps=True)


def _simulated_workers(
    one: EngineClient, other: EngineClient, costs: _Costs
) -> tuple[PrefillWorker, DecodeWorker]:
    assert one.info is not None
    assert other.info is not None
    prefill = PrefillWorker(
        latency=costs.prefill,
        pool=Pool(pages=one.info.slots, page_tokens=1),
        saturating_tokens=1,  # a core is busy with any prompt: they run one by one
    )
    decode = DecodeWorker(
        latency=costs.decode,
        pool=Pool(pages=other.info.slots, page_tokens=1),
        max_batch=other.info.max_running,
    )
    return prefill, decode


# --- the load ---


async def _serve(
    engine: DisaggregatedEngine | WorkerEngine, arrivals: Sequence[Arrival], seed: int
) -> tuple[list[Served], list[float]]:
    """Send requests as they arrive; return how they were served, and gaps between outputs."""
    rng = random.Random(seed)
    prompts = [_prompt(each.lengths.prompt, rng) for each in arrivals]
    started = time.perf_counter()
    gaps: list[float] = []

    async def serve(arrival: Arrival, prompt: list[int]) -> Served:
        await asyncio.sleep(max(0.0, started + arrival.seconds - time.perf_counter()))
        times = []
        with engine.submit(_request(prompt, arrival.lengths.output)) as outputs:
            async for _ in outputs:
                times.append(time.perf_counter() - started)
        gaps.extend(after - before for before, after in pairwise(times))
        return Served(arrival, times[0], times[-1])

    served = await asyncio.gather(*map(serve, arrivals, prompts))
    return list(served), gaps


def _figures(served: Sequence[Served], gaps: list[float] | None, targets: Targets) -> RunFigures:
    tpots = [each.tpot for each in served if each.arrival.lengths.output > 1]
    return RunFigures(
        ttft=mean(each.ttft for each in served),
        tpot=mean(tpots) if tpots else 0.0,
        p99_gap=quantiles(gaps, n=100)[-1] if gaps and len(gaps) > 1 else None,
        attainment=attainment(served, targets),
    )


def _prompt(tokens: int, rng: random.Random) -> list[int]:
    """Return random tokens, so that nothing of a prompt is cached."""
    return [rng.randrange(_FIRST_TOKEN_ID, _FIRST_TOKEN_ID + 200) for _ in range(tokens)]


def _request(prompt: list[int], output: int) -> EngineRequest:
    sampling = EngineSamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        request_id=f"{random.getrandbits(64):x}", token_ids=prompt, sampling=sampling
    )


def disaggregation_table(report: DisaggregationReport) -> ResultTable:
    """Return a row for each way of serving."""
    rows = [
        {
            "": name,
            "mean TTFT, ms": f"{1000 * run.ttft:,.0f}",
            "mean TPOT, ms": f"{1000 * run.tpot:.1f}",
            "P99 gap, ms": "" if run.p99_gap is None else f"{1000 * run.p99_gap:,.0f}",
            "targets met": f"{run.attainment:.0%}",
        }
        for name, run in report.runs.items()
    ]
    load = report.load
    caption = (
        f"{report.model}; {load.requests} requests at {report.rate:.2f} per second, prompts of"
        f" {min(load.prompts)} to {max(load.prompts)} tokens, answers of {min(load.outputs)} to"
        f" {max(load.outputs)}. Targets: {1000 * report.ttft_target:,.0f} ms to the first token,"
        f" {1000 * report.tpot_target:.1f} ms per further token. Fitted latencies are off by up to"
        f" {report.prefill_error:.0%} (prefill) and {report.decode_error:.0%} (decode) at other"
        f" sizes. A transfer takes {1000 * report.transfer_seconds:.1f} ms. On {report.machine}."
    )
    return ResultTable(rows=rows, title="Prefill and decode apart", caption=caption)
