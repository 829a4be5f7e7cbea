"""Running a load: on a server that is started for it, on one at a URL, simulated, or both ways."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

import msgspec

from midfill.errors import MidfillError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill.system.machine import describe_machine
from midfill.system.python_child import python_command
from midfill_lab.bench.clients import HttpClient, Sentinels
from midfill_lab.bench.peers.process import ServerProcess, free_port
from midfill_lab.bench.serving.batch_layout import LayoutName
from midfill_lab.bench.serving.cost_measurement import measure_costs
from midfill_lab.bench.serving.http_load import Endpoint, Target, run_load
from midfill_lab.bench.serving.metrics import OK, Limits, RequestResult
from midfill_lab.bench.serving.report import (
    SERVER,
    SIMULATED,
    ServingReport,
    ServingRun,
    serving_run,
)
from midfill_lab.bench.serving.simulation import SimulatedModel, simulate_load
from midfill_lab.bench.serving.step_costs import StepCosts, StepWork, averaged, read_costs
from midfill_lab.bench.serving.workload import TimedRequest, WorkloadOptions
from midfill_lab.bench.serving.workloads import make_requests
from midfill_lab.reporting import write_json

Progress = Callable[[str], None]
_START_SECONDS = 600.0
_PROBES = 8  # requests one after the other that tell what a request costs outside of steps
_PROBE_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What is run.

    Attributes:
        workload: the load.
        served: how the model is served, by a server that is started or simulated.
        url: of a running server, ending in ``/v1``; None starts one.
        runs: ``SERVER``, ``SIMULATED``, or both, where the one is checked against the other.
        limits: what counts as goodput.
        costs: file with the costs of simulated steps. They are measured, and written there, where
            there is no such file; None measures them and writes nothing.
        endpoint: of a server.
        sentinels: for a server that takes no suffix.
        api_keys: of a running server, for one tenant after the other.
        layout: of the rows of simulated steps.
        sends_hints: whether a running server gets hints for its scheduler; one that is started
            does.
    """

    workload: WorkloadOptions
    served: ServeOptions
    url: str | None = None
    runs: tuple[str, ...] = (SERVER,)
    limits: Limits | None = None
    costs: Path | None = None
    endpoint: Endpoint = "completions"
    sentinels: Sentinels | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    layout: LayoutName = "ragged"
    sends_hints: bool = False


def measure_serving(plan: ServingPlan, progress: Progress = lambda _: None) -> ServingReport:
    """Run a load.

    Args:
        plan: what is run, and on what.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be served, or no server answers.
    """
    requests = make_requests(plan.workload)
    is_measured = plan.costs is None or not plan.costs.exists()
    costs = step_costs(plan, progress) if SIMULATED in plan.runs else None
    runs: list[ServingRun] = []
    model = plan.served.model
    if SERVER in plan.runs:
        measured = _run_on_server(plan, requests, costs, progress)
        model = measured.model
        runs.append(serving_run(SERVER, measured.results, plan.limits))
        if costs is not None:
            if is_measured:  # again: a shared machine's speed drifts
                costs = averaged(costs, _measured_costs(plan, progress))
            costs = msgspec.structs.replace(costs, request_seconds=measured.request_seconds or 0.0)
            if plan.costs is not None:
                write_json(plan.costs, costs)
    if costs is not None:
        progress(f"simulating {len(requests):,} requests")
        simulated = simulate_load(_simulated_model(plan, costs), requests)
        runs.append(serving_run(SIMULATED, simulated, plan.limits))
    return ServingReport(
        model=model,
        machine=describe_machine(),
        workload=plan.workload,
        settings=_settings(plan),
        limits=plan.limits,
        runs=runs,
        costs=costs,
    )


def _settings(plan: ServingPlan) -> str:
    """Return how the model is served, in words."""
    if plan.url:
        return "served elsewhere"
    layout = [] if plan.layout == "ragged" else [f"in {plan.layout} batches"]
    return " ".join([*serve_flags(plan.served), *layout])


def step_costs(plan: ServingPlan, progress: Progress) -> StepCosts:
    """Return what steps cost: read from the plan's file, or measured, and written there.

    Raises:
        MidfillError: the file holds something else, or the model can't be loaded.
    """
    if plan.costs is not None and plan.costs.exists():
        return read_costs(plan.costs)
    costs = _measured_costs(plan, progress)
    if plan.costs is not None:
        write_json(plan.costs, costs)
    return costs


def _measured_costs(plan: ServingPlan, progress: Progress) -> StepCosts:
    served = plan.served
    return measure_costs(_open(served), served.model, served.options, progress)


def _simulated_model(plan: ServingPlan, costs: StepCosts) -> SimulatedModel:
    return SimulatedModel(_open(plan.served), costs, plan.served, plan.layout)


def _open(served: ServeOptions) -> Checkpoint:
    """Open the model as it is served."""
    adapter = resolve_adapter(served.model, served.options.adapter)
    return open_model(resolve(served.model), adapter, served.options.weights)


# --- a server ---


@dataclass(frozen=True)
class _ServerRun:
    """A load's run on a server.

    Attributes:
        model: the name that the server has for it.
        results: of the requests.
        request_seconds: see ``StepCosts``; None where it wasn't measured.
    """

    model: str
    results: list[RequestResult]
    request_seconds: float | None


def _run_on_server(
    plan: ServingPlan,
    requests: Sequence[TimedRequest],
    costs: StepCosts | None,
    progress: Progress,
) -> _ServerRun:
    if plan.url is not None:
        return asyncio.run(_load(plan, plan.url, plan.api_keys, requests, costs, progress))
    keys = tenant_keys(plan.workload)
    progress(f"starting a server of {plan.served.model}")
    with started_server(plan.served, keys) as url:
        return asyncio.run(_load(plan, url, keys, requests, costs, progress))


def tenant_keys(workload: WorkloadOptions) -> tuple[str, ...]:
    """Return an API key for each tenant; none where there is only one."""
    tenants = workload.tenants
    return tuple(f"key-{number}" for number in range(tenants)) if tenants > 1 else ()


async def _load(
    plan: ServingPlan,
    url: str,
    keys: Sequence[str],
    requests: Sequence[TimedRequest],
    costs: StepCosts | None,
    progress: Progress,
) -> _ServerRun:
    """Warm the server up, and run the load on it."""
    tenth = max(1, len(requests) // 10)

    def sent(number: int) -> None:
        if number % tenth == 0:
            progress(f"{number:,} of {len(requests):,} requests sent")

    async with HttpClient(url, keys[0] if keys else None) as client:
        model = await client.model()
        tenants = map(plan.workload.tenant_of, count())
        target = Target(
            model=model,
            endpoint=plan.endpoint,
            sentinels=plan.sentinels,
            api_keys=dict(zip(tenants, keys, strict=False)),
            sends_hints=plan.url is None or plan.sends_hints,
        )
        probes = await probe(client, target)
        overhead = None if costs is None else request_overhead(probes, costs)
        results = await run_load(client, target, requests, sent)
    return _ServerRun(model, results, overhead)


async def probe(client: HttpClient, target: Target) -> list[RequestResult]:
    """Send small requests one after the other, which warms the server up.

    Raises:
        MidfillError: the server answers none of them.
    """
    found: list[RequestResult] = []
    for number in range(_PROBES):
        prompt = f"# probe {number}\nimport os\n"
        request = TimedRequest(index=0, arrival=0.0, prompt=prompt, max_tokens=_PROBE_TOKENS)
        found += await run_load(client, target, [request])
    if not any(result.status == OK for result in found):
        raise MidfillError(f"{client.base_url} answers no request: {found[-1].status}")
    return found


def request_overhead(probes: Sequence[RequestResult], costs: StepCosts) -> float:
    """Return what a request takes outside of steps: what its first token took beyond its step.

    Args:
        probes: requests that were sent one after the other.
        costs: what steps cost.
    """
    beyond = []
    for result in probes[1:]:
        tokens = result.prompt_tokens - result.cached_tokens
        if result.status == OK and tokens > 0:
            pairs = tokens * (result.cached_tokens + tokens)
            work = StepWork(tokens, 1, 1, result.prompt_tokens, pairs)
            beyond.append(result.ttft - costs.seconds(work))
    return max(median(beyond), 0.0) if beyond else 0.0


@contextmanager
def started_server(served: ServeOptions, keys: Sequence[str]) -> Iterator[str]:
    """Start ``midfill serve`` on a free port; yield its URL, which ends in ``/v1``.

    Args:
        served: its options.
        keys: API keys that it takes; none lets everybody in.

    Raises:
        MidfillError: it doesn't start.
    """
    port = free_port()
    command = python_command("-m", "midfill", "serve", served.model, "--port", str(port))
    command += [*serve_flags(served), "--log-level", "warning"]
    command += [part for key in keys for part in ("--api-key", key)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(command, {}, port, Path(folder) / "server.log") as process,
    ):
        process.wait_until_ready(_START_SECONDS)
        yield f"{process.url}/v1"


def serve_flags(served: ServeOptions) -> list[str]:
    """Return the options of ``midfill serve`` that a plan can set."""
    run = served.options
    flags = ["--scheduler", run.scheduler]
    if run.token_budget is not None:
        flags += ["--token-budget", str(run.token_budget)]
    flags += ["--stream-interval-ms", f"{1000 * served.stream_interval:g}"]
    flags += ["--max-queued-tokens", str(served.max_queued_tokens)]
    if run.threads is not None:
        flags += ["--threads", str(run.threads)]
    if run.kv_memory is not None:
        flags += ["--kv-memory", str(run.kv_memory)]
    if run.adapter is not None:
        flags += ["--adapter", run.adapter]
    if not run.speculation:
        flags.append("--no-speculation")
    if not served.idle_prefill:
        flags.append("--no-idle-prefill")
    return flags
