"""bench overload: far more requests than can be answered in time, and how many still are.

First the KV pool is filled. Then ever more clients: the most answers within the deadline per second
is the peak. Then a multiple of that load. There are two loads:

    carets   a few documents, each request at a random place in one of them. At the peak clients ask
             one request after the other; then requests arrive at random moments, at a multiple of
             the peak's rate, whether or not earlier ones are answered
    editors  every client writes a document of its own and asks again a second after its last
             request has ended, refused or not. Then there are a multiple of the peak's clients,
             and of its documents

No part of the search repeats the requests of another. The load comes from the same machine, and
takes time from the server there, though little (``connections``).
"""

import asyncio
import dataclasses
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from benchmarks.reliability.asking import Outcome, refusal, whole_answer
from benchmarks.reliability.connections import Connections
from benchmarks.reliability.served import ServedModel, serve_model
from benchmarks.report import publish
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import document_pieces, standard_library_documents
from midfill_lab.bench.editing import SESSION_KINDS, edit_session
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_HUNG = 3  # deadlines after which a request counts as hung
_IDLE_SECONDS = 60
_FREE_SHARE = 0.05  # of a pool that counts as full
_THINK_SECONDS = 1.0  # of an editor's user, the mean
_SESSION_ROUNDS = 100
Say = Callable[[str], None]
OverloadKind = Literal["carets", "editors"]


class _Texts(NamedTuple):
    """What a request asks about."""

    prefix: str
    suffix: str


class OverloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        model: what is served.
        load: which.
        deadline: seconds for which a client waits for its whole answer.
        factor: multiple of the peak's rate at which requests arrive, or of its clients.
        seconds: for which they do.
        clients: how many there are in each part of the search for the peak; () for the load's own.
        search_seconds: how long each part takes.
        fill_seconds: for which the KV pool is filled before, at most.
        documents: of the load "carets".
        characters: of each document.
        output_tokens: of each answer.
        seed: chooses documents, places and moments.
    """

    model: str
    load: OverloadKind = "carets"
    deadline: float = 5.0
    factor: float = 10.0
    seconds: float = 40.0
    clients: tuple[int, ...] = ()
    search_seconds: float = 15.0
    fill_seconds: float = 120.0
    documents: int = 32
    characters: int = 2000
    output_tokens: int = 16
    seed: int = 0

    @property
    def searched(self) -> tuple[int, ...]:
        """The numbers of clients among which the peak is searched."""
        usual = (4, 8, 16, 32) if self.load == "carets" else (16, 32, 48, 64, 96)
        return self.clients or usual


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests of one phase.

    Attributes:
        offered: requests per second.
        goodput: answers within the deadline per second.
        answered, late: answers, and how many of them came after the deadline.
        refused: requests that were refused or ended with an error that says when to try again.
        failed: requests that failed otherwise, or never ended.
        p50, p99: seconds that answers took.
        refused_p50: seconds that refusals took.
        codes: the errors by code.
    """

    offered: float
    goodput: float
    answered: int
    late: int
    refused: int
    failed: int
    p50: float
    p99: float
    refused_p50: float
    codes: dict[str, int]


class OverloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        options: with which load.
        machine: where.
        peak_clients: with how many clients the peak was reached.
        peak: at the peak.
        overload: under the overload.
        leaked_slots: KV slots in use when nothing was in progress any more.
    """

    options: OverloadOptions
    machine: Machine
    peak_clients: int
    peak: Phase
    overload: Phase
    leaked_slots: int

    @property
    def kept(self) -> float:
        """Share of the peak's goodput that is left under the overload."""
        return self.overload.goodput / self.peak.goodput


async def measure_overload(options: OverloadOptions, say: Say = lambda _: None) -> OverloadReport:
    """Serve a model and overload it.

    Args:
        options: the load.
        say: is told what is being done.

    Raises:
        MidfillError: the server does not start, or answers nothing within the deadline.
    """
    load = _load(options)
    async with (
        serve_model(options.model, ["--log-level", "warning"]) as server,
        Connections(server.url) as connections,
    ):
        filled = await _fill_pool(server, connections, load, say)
        phases: dict[int, Phase] = {}
        for part, clients in enumerate(options.searched, filled):
            say(f"{clients} clients")
            phases[clients] = await _closed_loop(
                connections, load, clients, part, options.search_seconds
            )
        peak_clients = max(phases, key=lambda clients: phases[clients].goodput)
        peak = phases[peak_clients]
        if not peak.goodput:
            raise MidfillError("no answer within the deadline; --deadline allows a longer one")
        if isinstance(load, _Editors):
            clients = round(options.factor * peak_clients)
            say(f"{clients} clients")
            overload = await _closed_loop(
                connections, load, clients, filled + len(options.searched), options.seconds
            )
        else:
            rate = options.factor * peak.goodput
            say(f"{rate:.0f} requests per second")
            overload = await _open_loop(connections, load, rate)
        await server.wait_until_idle(_IDLE_SECONDS)
        leaked = await server.leaked_slots()
    return OverloadReport(
        options=options,
        machine=describe_machine(),
        peak_clients=peak_clients,
        peak=peak,
        overload=overload,
        leaked_slots=leaked,
    )


class _Carets:
    """Random places in a few documents."""

    def __init__(self, options: OverloadOptions) -> None:
        self.options = options
        texts = standard_library_documents(options.documents, seed=options.seed)
        self._texts = [text[: options.characters] for text in texts]

    def requests(self, client: int, chance: random.Random) -> Iterator[_Texts]:
        """Yield a client's requests."""
        while True:
            text = chance.choice(self._texts)
            caret = chance.randrange(len(text))
            yield _Texts(text[:caret], text[caret:])

    def pause(self, chance: random.Random) -> float:
        """Return how many seconds a client waits before a request."""
        return 0.0


class _Editors:
    """Users who write, each a document of its own; each part goes on where the last one ended."""

    def __init__(self, options: OverloadOptions) -> None:
        self.options = options
        self._documents = document_pieces(options.characters, seed=options.seed)
        self._sessions: dict[int, Iterator[_Texts]] = {}

    def requests(self, client: int, chance: random.Random) -> Iterator[_Texts]:
        """Yield a client's requests."""
        return self._sessions.setdefault(client, self._session(client))

    def pause(self, chance: random.Random) -> float:
        """Return how many seconds a client waits before a request."""
        return chance.expovariate(1.0 / _THINK_SECONDS)

    def _session(self, client: int) -> Iterator[_Texts]:
        source = {"document": self._documents[client % len(self._documents)]}
        seed = self.options.seed + client
        while True:
            for edit in edit_session(
                source, SESSION_KINDS["mix"], rounds=_SESSION_ROUNDS, seed=seed
            ):
                yield _Texts(edit.prefix, edit.suffix)


_Load = _Carets | _Editors


def _load(options: OverloadOptions) -> _Load:
    return _Carets(options) if options.load == "carets" else _Editors(options)


async def _fill_pool(server: ServedModel, connections: Connections, load: _Load, say: Say) -> int:
    """Send requests until no KV slot is free, or for long enough; return how many parts it took.

    A server that has run for a while has a full pool. One that hasn't evicts nothing yet, and its
    peak could not be compared with what comes later.
    """
    options = load.options
    most = max(round(options.fill_seconds / options.search_seconds), 1)
    for part in range(most):
        say(f"filling the KV pool, {options.searched[-1]} clients")
        await _closed_loop(connections, load, options.searched[-1], part, options.search_seconds)
        now = await server.metrics()
        if now["kv_slots_free"] < _FREE_SHARE * now["kv_slots"]:
            return part + 1
    return most


async def _closed_loop(
    connections: Connections, load: _Load, clients: int, part: int, seconds: float
) -> Phase:
    outcomes: list[Outcome] = []
    end = time.perf_counter() + seconds

    async def ask_on(client: int) -> None:
        chance = random.Random(f"{load.options.seed} {part} {client}")
        requests = load.requests(client, chance)
        while True:
            await asyncio.sleep(load.pause(chance))
            if time.perf_counter() >= end:
                return
            outcomes.append(await _ask(connections, load.options, next(requests)))

    await asyncio.gather(*(ask_on(client) for client in range(clients)))
    return _phase(outcomes, load.options, seconds)


async def _open_loop(connections: Connections, load: _Load, rate: float) -> Phase:
    options = load.options
    chance = random.Random(f"{options.seed} open")
    requests = load.requests(0, chance)
    tasks: list[asyncio.Task[Outcome]] = []
    started = due = time.perf_counter()
    while due < started + options.seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(connections, options, next(requests))))
        due += chance.expovariate(rate)
    outcomes = list(await asyncio.gather(*tasks))
    return _phase(outcomes, options, options.seconds)


async def _ask(connections: Connections, options: OverloadOptions, texts: _Texts) -> Outcome:
    body: dict[str, Any] = {
        "prompt": texts.prefix,
        "suffix": texts.suffix,
        "max_tokens": options.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "midfill": {"trim": False},
    }
    headers = {"X-Request-Timeout": f"{options.deadline:g}"}
    started = time.perf_counter()
    try:
        async with asyncio.timeout(_HUNG * options.deadline):
            response = await connections.post("/v1/completions", msgspec.json.encode(body), headers)
        if response.status == 200:
            outcome = whole_answer(response.body)
        else:
            outcome = refusal(response.status, response.headers, response.body)
    except TimeoutError:
        outcome = Outcome("hung", detail=f"nothing within {_HUNG * options.deadline:g} s")
    except OSError as error:
        outcome = Outcome("failed", detail=f"{type(error).__name__}: {error}")
    return dataclasses.replace(outcome, seconds=time.perf_counter() - started)


def _phase(outcomes: Sequence[Outcome], options: OverloadOptions, seconds: float) -> Phase:
    answers = [outcome.seconds for outcome in outcomes if outcome.kind == "complete"]
    refusals = [outcome.seconds for outcome in outcomes if outcome.kind == "retry"]
    late = sum(each > options.deadline for each in answers)
    return Phase(
        offered=len(outcomes) / seconds,
        goodput=(len(answers) - late) / seconds,
        answered=len(answers),
        late=late,
        refused=len(refusals),
        failed=len(outcomes) - len(answers) - len(refusals),
        p50=statistics.median(answers) if answers else 0.0,
        p99=_percentile(answers, 0.99),
        refused_p50=statistics.median(refusals) if refusals else 0.0,
        codes=dict(
            Counter(
                outcome.code or outcome.detail for outcome in outcomes if outcome.kind != "complete"
            )
        ),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)] if ranked else 0.0


def overload_table(report: OverloadReport) -> ResultTable:
    """Return the figures as a table."""
    options = report.options
    rows = [
        _row(f"peak, {report.peak_clients} clients", report.peak),
        _row(f"{options.factor:g} times as many", report.overload),
    ]
    codes = ", ".join(f"{count:,} {code}" for code, count in report.overload.codes.items())
    texts = f"texts of {options.characters} characters"
    what = {
        "carets": f"{options.documents} documents, {texts}, at random carets",
        "editors": f"each client writes a document of its own, {texts}, and asks again a second"
        " after its last request has ended",
    }[options.load]
    caption = (
        f"{report.kept:.0%} of the peak's answers within {options.deadline:g} s are left under the"
        f" overload. Seconds; refused then: {codes or 'none'}. {options.model}; {what};"
        f" answers of {options.output_tokens} tokens; the load is made on the same machine,"
        f" {report.machine}."
    )
    return ResultTable(rows=rows, title="Overload", caption=caption)


def _row(name: str, phase: Phase) -> dict[str, str]:
    return {
        "": name,
        "offered/s": f"{phase.offered:.1f}",
        "in time/s": f"{phase.goodput:.1f}",
        "answered": f"{phase.answered:,}",
        "too late": f"{phase.late:,}",
        "refused": f"{phase.refused:,}",
        "failed": f"{phase.failed:,}",
        "answer p50": f"{phase.p50:.2f}",
        "p99": f"{phase.p99:.2f}",
        "refusal p50": f"{phase.refused_p50:.3f}",
    }


DeadlineOption = Annotated[
    float, typer.Option(min=0.1, help="Seconds for which clients wait for an answer.")
]

FactorOption = Annotated[
    float, typer.Option(min=1, help="How many times as many requests as can be answered.")
]

LoadOption = Annotated[
    Literal["carets", "editors"],
    typer.Option(
        help="Requests at random places of a few documents, or users who each write their own."
    ),
]

SecondsOption = Annotated[float, typer.Option(min=1, help="Duration of the overload.")]


def overload(
    model: ModelArgument = None,
    load: LoadOption = "carets",
    deadline: DeadlineOption = 5,
    factor: FactorOption = 10,
    seconds: SecondsOption = 40,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Send a server far more requests than it can answer: as many as before must be in time."""
    options = OverloadOptions(
        model=model or DEFAULT_MODEL, load=load, deadline=deadline, factor=factor, seconds=seconds
    )
    with show_steps("starting the server") as say:
        report = asyncio.run(measure_overload(options, say))
    section = "overload" if load == "carets" else "overload-editors"
    publish(report, overload_table(report), section=section, json=json, docs=docs)
