"""``python -m benchmarks replicas``: one, two and four replicas under each way of routing.

Every number of replicas gets the same requests, beginning with empty caches; nothing is computed in
idle time, so that what is cached depends on routing alone. Answers are greedy and compared with
those of one replica.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.report import publish
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.serving.cluster.spec import require_ray
from midfill.serving.options import RouterName
from midfill.system.cache import cache_folder
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.clients import HttpClient, Measurement
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.editing import SESSION_KINDS, edit_session
from midfill_lab.bench.rounds import RoundsOptions, payload
from midfill_lab.cli.bench.options import JsonOption, OutputTokensOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable


@dataclass(frozen=True, slots=True)
class Ask:
    """A request.

    Attributes:
        document: its number.
        body: of /v1/completions.
    """

    document: int
    body: Mapping[str, Any]


Asks = Sequence[Sequence[Ask]]
"""Requests by user, in order."""


_GREEDY = {"temperature": 0}


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent.

    Attributes:
        users: who work at once, each with documents of its own.
        rounds: requests per user of EFIM's rounds load.
        edits: requests per user of a session of the editing mix.
        characters: of a document that are used.
        output_tokens: of each answer.
        seed: chooses the files and the edits.
    """

    users: int = 8
    rounds: int = 4
    edits: int = 12
    characters: int = 3000
    output_tokens: int = 8
    seed: int = 0


def loads(options: ReplicaLoad) -> dict[str, Asks]:
    """Return both loads. Answers are greedy, so that they can be compared."""
    return {"rounds": _rounds(options), "edits": _edits(options)}


def _rounds(options: ReplicaLoad) -> Asks:
    load = RoundsOptions(output_tokens=options.output_tokens)
    texts = standard_library_documents(options.users, seed=options.seed)
    return [
        [
            Ask(user, payload("native", text[: options.characters], number, load, "") | _GREEDY)
            for number in range(1, options.rounds + 1)
        ]
        for user, text in enumerate(texts)
    ]


def _edits(options: ReplicaLoad) -> Asks:
    texts = standard_library_documents(2 * options.users, seed=options.seed + 1)
    common = {"max_tokens": options.output_tokens, "ignore_eos": True, **_GREEDY}
    return [
        [
            Ask(
                2 * user + int(edit.document),
                {**common, "prompt": edit.prefix, "suffix": edit.suffix},
            )
            for edit in edit_session(
                {str(name): text[: options.characters] for name, text in enumerate(pair)},
                SESSION_KINDS["mix"],
                rounds=options.edits,
                seed=options.seed + user,
            )
        ]
        for user, pair in enumerate(zip(texts[::2], texts[1::2], strict=True))
    ]


@dataclass(frozen=True, slots=True)
class BenchCluster:
    """Replicas that run.

    Attributes:
        environment: of the commands that look at it.
    """

    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        """Run ``midfill cluster`` with these arguments, and return what it writes.

        Raises:
            MidfillError: it fails.
        """
        done = subprocess.run(
            [sys.executable, "-m", "midfill", "cluster", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it says nothing"]
            raise MidfillError(f"'midfill cluster {arguments[0]}' has failed: {lines[-1]}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Return what ``midfill cluster status --json`` tells."""
        return dict(json.loads(self.run("status", "--json")))


@contextlib.contextmanager
def bench_cluster(model: str, *options: str) -> Iterator[tuple[BenchCluster, str]]:
    """Start replicas, and yield them and their URL; they end with the ``with`` block.

    Args:
        model: what they run.
        options: further options of ``midfill cluster up``.

    Raises:
        MidfillError: they don't start.
    """
    with tempfile.TemporaryDirectory(prefix="midfill-bench-") as folder:
        # The user's models and compiled kernels, but not the user's own cluster.
        for entry in cache_folder().iterdir():
            if entry.is_dir():
                (Path(folder) / entry.name).symlink_to(entry.resolve())
        environment = {**os.environ, "MIDFILL_CACHE": folder}
        environment.pop("RAY_ADDRESS", None)
        cluster = BenchCluster(environment)
        try:
            cluster.run("up", model, "--port", "0", *options)
            yield cluster, str(cluster.status()["url"])
        finally:
            with contextlib.suppress(MidfillError):
                cluster.run("down")


_KILLED_AFTER = 0.25  # of the requests
_RECOVERY_SECONDS = 300.0
_TICK_SECONDS = 0.5


class Failover(msgspec.Struct, frozen=True, kw_only=True):
    """What happened.

    Attributes:
        requests: how many were sent, one user's after the other's answer.
        wrong: answers other than one replica gives.
        failed: requests that ended with an error.
        resumed: requests that another replica continued.
        output_tokens: of each answer.
        longest_before, longest_after: seconds of the longest request that ended before the kill,
            and of the longest one after it.
        answered_seconds: from the kill until a request that had begun before it was answered by
            the other replica, the last of them.
        restored_seconds: from the kill until two replicas ran again.
    """

    requests: int
    wrong: int
    failed: int
    resumed: int
    output_tokens: int
    longest_before: float
    longest_after: float
    answered_seconds: float
    restored_seconds: float

    def sentence(self) -> str:
        """Return it in words."""
        return (
            f"One of two replicas killed under the editing mix, with answers of"
            f" {self.output_tokens} tokens: of {self.requests} requests {self.wrong} were answered"
            f" otherwise, {self.failed} failed, {self.resumed} were continued by the other replica;"
            f" requests in progress were answered within"
            f" {self.answered_seconds:.1f} s of the kill (the longest request took"
            f" {self.longest_before:.1f} s before it and {self.longest_after:.1f} s after it),"
            f" and two replicas ran again after {self.restored_seconds:.0f} s."
        )


class _Sent(msgspec.Struct, frozen=True):
    """A request: its answer, None if it failed; when it began and ended."""

    text: str | None
    began: float
    ended: float


def lose_a_replica(
    cluster: BenchCluster, url: str, load: Asks, expected: Sequence[Sequence[str]]
) -> Failover:
    """Send a load, and kill a replica on the way.

    Args:
        cluster: two replicas on this machine.
        url: theirs.
        load: what to send.
        expected: the answers, by user and request.
    """
    before = cluster.status()
    victim = max(before["replicas"], key=lambda name: int(before["replicas"][name]["documents"]))
    process = int(before["replicas"][victim]["process_id"])
    killed, sent = asyncio.run(_send_and_kill(url, load, process))
    restored = _wait_until_restored(cluster, victim, killed)
    every = [answer for user in sent for answer in user]
    texts = [text for user in expected for text in user]
    met = [answer for answer in every if answer.began <= killed <= answer.ended]
    return Failover(
        requests=len(every),
        wrong=sum(
            answer.text is not None and answer.text != text
            for answer, text in zip(every, texts, strict=True)
        ),
        failed=sum(answer.text is None for answer in every),
        resumed=int(cluster.status()["resumed"]) - int(before["resumed"]),
        output_tokens=int(load[0][0].body["max_tokens"]),
        longest_before=_longest([answer for answer in every if answer.ended < killed]),
        longest_after=_longest([answer for answer in every if answer.ended >= killed]),
        answered_seconds=max((answer.ended - killed for answer in met), default=0.0),
        restored_seconds=restored,
    )


async def _send_and_kill(url: str, load: Asks, process: int) -> tuple[float, list[list[_Sent]]]:
    """Send all requests, and kill a process after some; return when, and what was sent."""
    total = sum(map(len, load))
    done = 0
    kill = asyncio.Event()

    async with HttpClient(f"{url}/v1") as client:
        model = await client.model()

        async def send(body: Mapping[str, Any]) -> _Sent:
            nonlocal done
            began = time.perf_counter()
            try:
                text = (await client.complete({**body, "model": model})).text
            except MidfillError:
                text = None
            done += 1
            if done >= _KILLED_AFTER * total:
                kill.set()
            return _Sent(text, began, time.perf_counter())

        async def user(asks: Sequence[Ask]) -> list[_Sent]:
            return [await send(each.body) for each in asks]

        users = [asyncio.create_task(user(asks)) for asks in load]
        await kill.wait()
        os.kill(process, signal.SIGKILL)
        killed = time.perf_counter()
        return killed, [await each for each in users]


def _wait_until_restored(cluster: BenchCluster, victim: str, killed: float) -> float:
    """Return how many seconds after the kill there were two replicas again.

    Raises:
        MidfillError: there never were.
    """
    while time.perf_counter() - killed < _RECOVERY_SECONDS:
        present = cluster.status()["replicas"]
        if victim not in present and len(present) == 2:
            return time.perf_counter() - killed
        time.sleep(_TICK_SECONDS)
    raise MidfillError(f"no second replica has come back in {_RECOVERY_SECONDS:g} s")


def _longest(sent: Sequence[_Sent]) -> float:
    return max((answer.ended - answer.began for answer in sent), default=0.0)


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
        computed_tokens: prompt tokens that were not.
        wall_seconds: from the first request to the last answer.
        different: answers that one replica has given otherwise.
    """

    load: str
    replicas: int
    router: RouterName
    requests: int
    hit_rate: float
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
                    texts = [[answer.text for answer in user] for user in answers]
                    run = _summary(name, replicas, router, wall, answers)
                    runs.append(_compared(run, texts, expected.setdefault(name, texts)))
                if failover and not long_texts:
                    progress("answers to compare with")
                    _, answers = asyncio.run(_send(url, long_answers))
                    long_texts = [[answer.text for answer in user] for user in answers]
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
) -> RoutedRun:
    every = [answer for user in answers for answer in user]
    prompt = sum(answer.prompt_tokens for answer in every)
    if not prompt:
        raise MidfillError("the server tells no token counts")
    return RoutedRun(
        load=load,
        replicas=replicas,
        router=router,
        requests=len(every),
        hit_rate=sum(answer.cached_tokens for answer in every) / prompt,
        computed_tokens=sum(answer.computed_tokens for answer in every),
        wall_seconds=wall,
        different=0,
    )


def _compared(run: RoutedRun, texts: list[list[str]], expected: list[list[str]]) -> RoutedRun:
    """Return a run with the number of answers that are not as expected."""
    pairs = zip(itertools.chain(*texts), itertools.chain(*expected), strict=True)
    return msgspec.structs.replace(run, different=sum(text != other for text, other in pairs))


def replicas_table(report: ReplicasReport) -> ResultTable:
    """A row per number of replicas and router."""
    rows = []
    for run in report.runs:
        single = report.run(run.load, report.runs[0].replicas, "document")
        rows.append(
            {
                "load": run.load,
                "replicas": str(run.replicas),
                "routing": run.router if run.replicas > 1 else "-",
                "hit rate": f"{run.hit_rate:.1%}",
                "of one replica's": f"{run.hit_rate / single.hit_rate:.1%}",
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


CountsOption = Annotated[str, typer.Option(help="Numbers of replicas, separated by commas.")]
UsersOption = Annotated[int, typer.Option(min=1, help="Users who work at once.")]
RoundsOption = Annotated[
    int, typer.Option(min=1, max=7, help="Requests per user of EFIM's rounds.")
]
EditsOption = Annotated[int, typer.Option(min=1, help="Requests per user of the editing mix.")]
CharactersOption = Annotated[int, typer.Option(min=200, help="Characters of a document.")]
FailoverOption = Annotated[bool, typer.Option(help="Kill one of two replicas as well.")]


def replicas(
    model: ModelArgument = None,
    counts: CountsOption = "1,2,4",
    users: UsersOption = 8,
    rounds: RoundsOption = 4,
    edits: EditsOption = 12,
    characters: CharactersOption = 3000,
    output_tokens: OutputTokensOption = 8,
    failover: FailoverOption = True,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure replicas on Ray: hit rates by document and in turn, and what a lost one costs."""
    require_ray()

    load = ReplicaLoad(
        users=users,
        rounds=rounds,
        edits=edits,
        characters=characters,
        output_tokens=output_tokens,
    )
    numbers = parse_counts(counts)
    with show_steps("starting") as progress:
        report = measure_replicas(
            model or DEFAULT_MODEL, load, numbers, failover=failover, progress=progress
        )
    publish(report, replicas_table(report), section="replicas", json=json, docs=docs)
