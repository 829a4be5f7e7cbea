"""Documents that go to another replica: what it is worth to have their KV follow them.

Two cases, each with and without moving KV, on the same requests: a replica is added, after which
the second half of the load is measured; and all requests go to the replicas in turn, as if each one
were spilled.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec

from benchmarks.replicas import (
    Asks,
    BenchCluster,
    CharactersOption,
    EditsOption,
    ReplicaLoad,
    UsersOption,
    bench_cluster,
    loads,
)
from benchmarks.report import publish
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.serving.cluster.spec import require_ray
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.clients import HttpClient, Measurement
from midfill_lab.cli.bench.options import JsonOption, OutputTokensOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_OPTIONS = ("--no-idle-prefill", "--cpus-per-replica", "1")
_ADDED_SECONDS = 600.0  # in which a replica has to be added
_TICK_SECONDS = 2.0
_BUSY_TOKENS = 64  # of the answers that keep the first replica busy until there is another one

CASES = {
    "replica added": ("--replicas", "1", "--max-replicas", "2", "--target-requests", "0.1"),
    "each spilled": ("--replicas", "2", "--router", "round-robin"),
}


class MovedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One load.

    Attributes:
        case: one of CASES.
        moving: whether KV follows documents.
        requests: how many were measured.
        hit_rate: share of their prompts' tokens that was cached.
        computed_tokens: prompt tokens that were not.
        moved: prompts whose KV was fetched.
        wall_seconds: from the first request that was measured to the last answer.
        different: answers other than without moving.
    """

    case: str
    moving: bool
    requests: int
    hit_rate: float
    computed_tokens: int
    moved: int
    wall_seconds: float
    different: int


class MovesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    load: ReplicaLoad
    runs: list[MovedRun]


def measure_moves(
    model: str, options: ReplicaLoad, progress: Callable[[str], None] = lambda _: None
) -> MovesReport:
    """Run the editing mix in each case, without and with moving KV.

    Raises:
        MidfillError: a cluster doesn't start, no replica is added, or a request fails.
    """
    load = loads(options)["edits"]
    runs: list[MovedRun] = []
    for case, up in CASES.items():
        expected: list[str] = []
        for moving in (False, True):
            name = f"{case}, {'with' if moving else 'without'} moving KV"
            progress(f"{name}: starting")
            switch = "--move-kv" if moving else "--no-move-kv"
            with bench_cluster(model, *_OPTIONS, *up, switch) as (cluster, url):
                measured = load
                if case == "replica added":
                    half = len(load[0]) // 2
                    progress(f"{name}: first half")
                    asyncio.run(_send(url, [user[:half] for user in load]))
                    progress(f"{name}: waiting for a replica")
                    asyncio.run(_wait_until_added(cluster, url))
                    measured = [user[half:] for user in load]
                progress(f"{name}: measuring")
                wall, answers = asyncio.run(_send(url, measured))
                time.sleep(_TICK_SECONDS + 1)  # replicas tell their numbers every two seconds
                moved = int(cluster.status()["moved"])
            texts = [answer.text for answer in answers]
            expected = expected or texts
            prompt = sum(answer.prompt_tokens for answer in answers)
            runs.append(
                MovedRun(
                    case=case,
                    moving=moving,
                    requests=len(answers),
                    hit_rate=sum(answer.cached_tokens for answer in answers) / prompt,
                    computed_tokens=sum(answer.computed_tokens for answer in answers),
                    moved=moved,
                    wall_seconds=wall,
                    different=sum(a != b for a, b in zip(texts, expected, strict=True)),
                )
            )
    return MovesReport(model=model, machine=describe_machine(), load=options, runs=runs)


async def _send(url: str, load: Asks) -> tuple[float, list[Measurement]]:
    """Send a load; return wall seconds, and what was measured, by user and then by request."""
    async with HttpClient(f"{url}/v1") as client:
        model = await client.model()

        async def user(number: int) -> list[Measurement]:
            return [await client.complete({**each.body, "model": model}) for each in load[number]]

        started = time.perf_counter()
        answers = await asyncio.gather(*map(user, range(len(load))))
        return time.perf_counter() - started, [answer for each in answers for answer in each]


async def _wait_until_added(cluster: BenchCluster, url: str) -> None:
    """Keep the only replica busy until there are two.

    Raises:
        MidfillError: there never are.
    """
    deadline = time.perf_counter() + _ADDED_SECONDS
    async with HttpClient(f"{url}/v1") as client:
        body = {"model": await client.model(), "prompt": "#", "temperature": 0}
        while time.perf_counter() < deadline:
            looking = asyncio.create_task(asyncio.to_thread(cluster.status))
            while not looking.done():
                await client.complete({**body, "max_tokens": _BUSY_TOKENS, "ignore_eos": True})
            if len((await looking)["replicas"]) == 2:
                return
    raise MidfillError(f"no replica was added in {_ADDED_SECONDS:g} s")


def moves_table(report: MovesReport) -> ResultTable:
    """A row per case, without and with moving."""
    rows = [
        {
            "case": run.case,
            "KV": "moves" if run.moving else "stays",
            "requests": str(run.requests),
            "hit rate": f"{run.hit_rate:.1%}",
            "computed tokens": f"{run.computed_tokens:,}",
            "prompts moved": str(run.moved),
            "wall s": f"{run.wall_seconds:.1f}",
            "other answers": str(run.different),
        }
        for run in report.runs
    ]
    load = report.load
    caption = (
        f"{report.model}, {load.users} users at once with {load.edits} requests each of the editing"
        f" mix, documents of {load.characters} characters, {load.output_tokens} tokens out, a core"
        " per replica, nothing computed in idle time. Replica added: the second half of the"
        " requests, after a second replica was started beside the first. Each spilled: two"
        f" replicas, requests to each in turn. {report.machine}."
    )
    return ResultTable(rows=rows, labels=2, title="KV that moves", caption=caption)


def kv_moves(
    model: ModelArgument = None,
    users: UsersOption = 8,
    edits: EditsOption = 12,
    characters: CharactersOption = 3000,
    output_tokens: OutputTokensOption = 8,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure KV that follows documents to other replicas on Ray."""
    require_ray()
    load = ReplicaLoad(users=users, edits=edits, characters=characters, output_tokens=output_tokens)
    with show_steps("starting") as progress:
        report = measure_moves(model or DEFAULT_MODEL, load, progress)
    publish(report, moves_table(report), section="kv-moves", json=json, docs=docs)
