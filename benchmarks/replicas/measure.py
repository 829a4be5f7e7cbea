"""``python -m benchmarks replicas``: one, two and four replicas under each way of routing.

Every number of replicas gets the same requests, beginning with empty caches; nothing is computed in
idle time, so that what is cached depends on routing alone. Answers are greedy and compared with
those of one replica.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.replicas.failover import Failover, lose_a_replica
from benchmarks.replicas.load import Asks, ReplicaLoad, loads
from benchmarks.replicas.population import Step
from benchmarks.replicas.running import bench_cluster
from benchmarks.replicas.simulation import Simulation, StepCosts
from midfill.config import RouterName
from midfill.errors import MidfillError
from midfill.lab.bench.clients import HttpClient, Measurement
from midfill.system.machine import Machine, describe_machine
from midfill.system.reporting.result_table import ResultTable

# The order of requests is all that they decide, and with it which version a replica holds.
_COSTS = StepCosts(prefill_seconds=0.001, decode_seconds=0.01, decode_weight=0.3)

_LOST_TOKENS = 64  # of an answer, so that some are being written when a replica is killed
OPTIONS = ("--no-idle-prefill", "--cpus-per-replica", "1")


class RoutedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One load on some replicas.

    Attributes:
        load: "rounds" or "edits".
        replicas: how many.
        router: how requests were distributed.
        requests: how many.
        hit_rate: share of the prompts' tokens that was cached.
        simulated: the same by ``simulation``, fed with what the first run computed.
        computed_tokens: prompt tokens that were not.
        wall_seconds: from the first request to the last answer.
        different: answers that one replica has given otherwise.
    """

    load: str
    replicas: int
    router: RouterName
    requests: int
    hit_rate: float
    simulated: float
    computed_tokens: int
    wall_seconds: float
    different: int


class ReplicasReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    load: ReplicaLoad
    runs: list[RoutedRun]
    failover: Failover | None

    def run(self, load: str, replicas: int, router: RouterName) -> RoutedRun:
        """Return one of the runs."""
        return next(
            each
            for each in self.runs
            if (each.load, each.replicas, each.router) == (load, replicas, router)
        )


def measure_replicas(
    model: str,
    options: ReplicaLoad,
    counts: Sequence[int] = (1, 2, 4),
    *,
    failover: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> ReplicasReport:
    """Run both loads on each number of replicas, by document and in turn.

    Raises:
        MidfillError: a cluster doesn't start, or a request fails.
    """
    bodies = loads(options)
    long_answers = loads(
        msgspec.structs.replace(
            options, seed=options.seed + 100, output_tokens=max(_LOST_TOKENS, options.output_tokens)
        )
    )["edits"]
    expected: dict[str, list[list[str]]] = {}
    long_texts: list[list[str]] = []
    traces: dict[str, list[list[Step]]] = {}
    runs: list[RoutedRun] = []
    lost: Failover | None = None
    for replicas in counts:
        routers: tuple[RouterName, ...] = ("document", "round-robin")
        for router in routers if replicas > 1 else routers[:1]:
            progress(f"{replicas} replicas, {router}: starting")
            up = (*OPTIONS, "--no-move-kv", "--replicas", str(replicas), "--router", router)
            with bench_cluster(model, *up) as (cluster, url):
                for name, load in bodies.items():
                    progress(f"{replicas} replicas, {router}: {name}")
                    wall, answers = asyncio.run(_send(url, load))
                    texts = [[one.text for one in user] for user in answers]
                    trace = traces.setdefault(name, _trace(load, answers))
                    run = _summary(name, replicas, router, wall, answers, trace)
                    runs.append(_compared(run, texts, expected.setdefault(name, texts)))
                if failover and not long_texts:
                    progress("answers to compare with")
                    _, answers = asyncio.run(_send(url, long_answers))
                    long_texts = [[one.text for one in user] for user in answers]
                elif failover and replicas == 2 and router == "document":
                    progress("2 replicas: losing one")
                    lost = lose_a_replica(cluster, url, long_answers, long_texts)
    return ReplicasReport(
        model=model, machine=describe_machine(), load=options, runs=runs, failover=lost
    )


async def _send(url: str, load: Asks) -> tuple[float, list[list[Measurement]]]:
    """Send a load; return wall seconds, and what was measured by user and request."""
    async with HttpClient(f"{url}/v1") as client:
        model = await client.model()
        await client.complete({"model": model, "prompt": "def", "max_tokens": 2})

        async def user(number: int) -> list[Measurement]:
            return [await client.complete({**each.body, "model": model}) for each in load[number]]

        started = time.perf_counter()
        answers = await asyncio.gather(*map(user, range(len(load))))
        return time.perf_counter() - started, list(answers)


def _summary(
    load: str,
    replicas: int,
    router: RouterName,
    wall: float,
    answers: Sequence[Sequence[Measurement]],
    trace: Sequence[Sequence[Step]],
) -> RoutedRun:
    every = [one for user in answers for one in user]
    prompt = sum(one.prompt_tokens for one in every)
    if not prompt:
        raise MidfillError("the server tells no token counts")
    return RoutedRun(
        load=load,
        replicas=replicas,
        router=router,
        requests=len(every),
        hit_rate=sum(one.cached_tokens for one in every) / prompt,
        simulated=Simulation(trace, _COSTS, replicas=replicas, router=router).run().hit_rate,
        computed_tokens=sum(one.computed_tokens for one in every),
        wall_seconds=wall,
        different=0,
    )


def _trace(load: Asks, answers: Sequence[Sequence[Measurement]]) -> list[list[Step]]:
    """Return a run's requests as the simulation takes them."""
    return [
        [
            Step(ask.document, one.prompt_tokens, one.computed_tokens)
            for ask, one in zip(asks, user, strict=True)
        ]
        for asks, user in zip(load, answers, strict=True)
    ]


def _compared(run: RoutedRun, texts: list[list[str]], expected: list[list[str]]) -> RoutedRun:
    """Return a run with the number of answers that are not as expected."""
    pairs = zip(itertools.chain(*texts), itertools.chain(*expected), strict=True)
    return msgspec.structs.replace(run, different=sum(one != other for one, other in pairs))


def replicas_table(report: ReplicasReport) -> ResultTable:
    """A row per number of replicas and router."""
    rows = []
    for run in report.runs:
        one = report.run(run.load, report.runs[0].replicas, "document")
        rows.append(
            {
                "load": run.load,
                "replicas": str(run.replicas),
                "routing": run.router if run.replicas > 1 else "-",
                "hit rate": f"{run.hit_rate:.1%}",
                "simulated": f"{run.simulated:.1%}",
                "of one replica's": f"{run.hit_rate / one.hit_rate:.1%}",
                "computed tokens": f"{run.computed_tokens:,}",
                "wall s": f"{run.wall_seconds:.1f}",
                "other answers": str(run.different),
            }
        )
    load = report.load
    caption = (
        f"{report.model}, {load.users} users at once, each with {load.rounds} requests of EFIM's"
        f" rounds and {load.edits} of the editing mix, documents of {load.characters} characters,"
        f" {load.output_tokens} tokens out, a core per replica, nothing computed in idle time;"
        f" {report.machine}."
    )
    if report.failover is not None:
        caption += f" {report.failover.sentence()}"
    return ResultTable(rows=rows, labels=3, title="Replicas", caption=caption)
