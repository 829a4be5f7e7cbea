"""bench soak: hours of a server's life in minutes: does anything grow that should not?

Clients edit documents, ask for completions, disconnect half-way, send what makes no sense
and open connections that they never use. Memory is sampled once all that is bounded has reached its
bound, since until then it grows as it should: the KV pool, what is remembered of documents, and the
memory of a step, which a request for as many answers as may run fills at once.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import aiohttp
import msgspec
import numpy as np
import typer

from benchmarks.reliability.asking import ask
from benchmarks.reliability.overload import Say
from benchmarks.reliability.served import (
    ServedModel,
    descriptors,
    resident_bytes,
    serve_model,
)
from benchmarks.report import publish
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_MB = 1e6
_IDLE_SECONDS = 120
_TIMEOUT = 120.0
_RAW_CHARACTERS = 400
_SAMPLE_SECONDS = 1.0
_MAX_FILL_SECONDS = 3600
_FILLED = ("documents", "tokens")  # the load sends no other files
_FULL = 0.9  # of a bound; what goes next leaves some room
_FEW_TOKENS = 4
_SETTLE_SECONDS = 7.0  # for connections that are kept alive


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        model: what is served.
        minutes: how long, once all that is bounded has been filled.
        kv_memory: the server's ``--kv-memory``.
        document_memory: the server's ``--document-memory``; small, so that it is soon full.
        clients: that edit documents.
        streams: that are active at the same time at the end, while ``idle`` connections are open.
        idle: connections that are never used.
        characters: of each document.
        output_tokens: of most answers.
        seed: chooses what is done.
    """

    model: str
    minutes: float = 30.0
    kv_memory: str = "256M"
    document_memory: str = "1M"
    clients: int = 6
    streams: int = 200
    idle: int = 1000
    characters: int = 4000
    output_tokens: int = 24
    seed: int = 0


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        options: with which load.
        machine: where.
        requests: how many of each kind were sent; those among them that were refused for a while.
        failed: answers that were neither what was asked for nor an error that fits; streams, too.
        server_slope, engine_slope: growth of the resident memory, in MB per minute.
        server_mb, engine_mb: the resident memory at the end.
        descriptors: what the server has open when idle, at the beginning and at the end.
        leaked_slots: KV slots in use when nothing was in progress any more.
        streams_complete: how many of the streams came to their end while the idle connections were
            open.
        stream_seconds: how long they took together.
        evicted: tokens that the prefix cache has evicted.
        failures: what some of ``failed`` said.
    """

    options: SoakOptions
    machine: Machine
    requests: dict[str, int]
    failed: int
    server_slope: float
    engine_slope: float
    server_mb: float
    engine_mb: float
    descriptors: tuple[int, int]
    leaked_slots: int
    streams_complete: int
    stream_seconds: float
    evicted: int
    failures: list[str]


@dataclass
class _Samples:
    """The memory of the server and its engine over time."""

    minutes: list[float] = field(default_factory=list)
    server: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)

    def slopes(self) -> tuple[float, float]:
        """Return the growth of both in MB per minute, by least squares."""
        if len(self.minutes) < 2:
            return 0.0, 0.0
        fits = (np.polyfit(self.minutes, values, 1)[0] for values in (self.server, self.engine))
        server, engine = (float(fit) / _MB for fit in fits)
        return server, engine


@dataclass
class _Load:
    """Clients, and what they did."""

    server: ServedModel
    options: SoakOptions
    texts: Sequence[str]
    requests: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run_client(self, number: int) -> None:
        """Edit one document after the other until the load is over."""
        chance = random.Random(f"{self.options.seed} {number}")
        while not self.over.is_set():
            text = chance.choice(self.texts)
            start = chance.randrange(max(len(text) - self.options.characters, 1))
            text = text[start : start + self.options.characters]
            caret = len(text) // 2
            for _ in range(chance.randint(1, 12)):
                action = chance.choice([self._infill] * 6 + [self._abandon, self._err, self._raw])
                await action(chance, text, caret)
                if self.over.is_set():
                    return
                typed = chance.choice(("x", " = ", "self.", "\n    "))
                text, caret = text[:caret] + typed + text[caret:], caret + len(typed)

    async def _infill(self, chance: random.Random, text: str, caret: int) -> None:
        body = self._body(text, caret) | {"stream": chance.random() < 0.5}
        await self._expect("infill", body, "complete")

    async def _raw(self, chance: random.Random, text: str, caret: int) -> None:
        """Ask about a part of the text as a raw prompt."""
        start = max(caret - chance.randint(1, _RAW_CHARACTERS), 0)
        body = {"prompt": text[start:caret], "max_tokens": self.options.output_tokens}
        await self._expect("raw", body, "complete")

    async def _err(self, chance: random.Random, text: str, caret: int) -> None:
        wrong = chance.choice(
            ({"max_tokens": -1}, {"temperature": "hot"}, {"n": 10**6}, {"prompt": [-1]})
        )
        self.requests["wrong"] += 1
        body = self._body(text, caret) | wrong
        async with self.server.session.post(self._url, json=body) as response:
            if response.status != 400:
                self.failures.append(f"{wrong} got {response.status}")
            await response.read()

    async def _abandon(self, chance: random.Random, text: str, caret: int) -> None:
        """Disconnect at any time of a long answer."""
        self.requests["abandoned"] += 1
        body = self._body(text, caret) | {"max_tokens": 200, "stream": True, "ignore_eos": True}
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with (
                asyncio.timeout(chance.uniform(0.0, 1.5)),
                self.server.session.post(self._url, json=body) as response,
            ):
                async for _ in response.content:
                    pass

    async def _expect(self, kind: str, body: dict[str, Any], expected: str) -> None:
        self.requests[kind] += 1
        outcome = await ask(self.server.session, self.server.url, body, _TIMEOUT)
        if outcome.kind == "retry":  # a full queue
            self.requests["refused"] += 1
        elif outcome.kind != expected:
            self.failures.append(f"{kind}: {outcome.kind} {outcome.status} {outcome.detail}")

    def _body(self, text: str, caret: int) -> dict[str, Any]:
        tokens = self.options.output_tokens
        return {"prompt": text[:caret], "suffix": text[caret:], "max_tokens": tokens}

    @property
    def _url(self) -> str:
        return f"{self.server.url}/v1/completions"


async def measure_soak(options: SoakOptions, say: Say = lambda _: None) -> SoakReport:
    """Serve a model for a while and report what has grown.

    Args:
        options: the load.
        say: is told what is being done.

    Raises:
        MidfillError: the server does not start.
    """
    texts = standard_library_documents(200, seed=options.seed, shortest=6000, longest=40_000)
    flags = ["--kv-memory", options.kv_memory, "--document-memory", options.document_memory]
    flags += ["--log-level", "warning"]
    async with serve_model(options.model, flags) as server:
        load = _Load(server, options, texts)
        await server.metrics()
        await asyncio.sleep(_SETTLE_SECONDS)
        before = descriptors(server.process_id)
        clients = [asyncio.create_task(load.run_client(n)) for n in range(options.clients)]
        say("filling the KV pool, the memory for documents and that of a step")
        await _until_full(server)
        await _run_all_answers(server)
        say(f"{options.minutes:g} minutes")
        samples = await _sample(server, options.minutes)
        load.over.set()
        await asyncio.gather(*clients)
        say(f"{options.streams} streams beside {options.idle} idle connections")
        complete, seconds = await _streams(load)
        await server.wait_until_idle(_IDLE_SECONDS)
        await asyncio.sleep(_SETTLE_SECONDS)
        after = descriptors(server.process_id)
        leaked = await server.leaked_slots()
        evicted = int((await server.metrics())["evicted_tokens_total"])
    server_slope, engine_slope = samples.slopes()
    return SoakReport(
        options=options,
        machine=describe_machine(),
        requests=dict(load.requests),
        failed=len(load.failures),
        server_slope=server_slope,
        engine_slope=engine_slope,
        server_mb=samples.server[-1] / _MB,
        engine_mb=samples.engine[-1] / _MB,
        descriptors=(before, after),
        leaked_slots=leaked,
        streams_complete=complete,
        stream_seconds=seconds,
        evicted=evicted,
        failures=load.failures[:5],
    )


async def _until_full(server: ServedModel) -> None:
    """Wait until all that is bounded has been filled.

    Raises:
        MidfillError: the load does not fill it.
    """
    try:
        async with asyncio.timeout(_MAX_FILL_SECONDS):
            while not await _is_full(server):
                await asyncio.sleep(_SAMPLE_SECONDS)
    except TimeoutError:
        raise MidfillError(
            f"the load has not filled the server's memory in {_MAX_FILL_SECONDS} s; give it less:"
            " --kv-memory, --document-memory"
        ) from None


async def _is_full(server: ServedModel) -> bool:
    for kind in _FILLED:
        held, most = await server.remembered(kind)
        if held < _FULL * most:
            return False
    return (await server.metrics())["evicted_tokens_total"] > 0


async def _run_all_answers(server: ServedModel) -> None:
    """Have a step compute the logits of as many answers as run at a time.

    Raises:
        MidfillError: they are refused, except for a while.
    """
    body = {
        "prompt": "def ",
        "n": ModelOptions().max_running,
        "max_tokens": _FEW_TOKENS,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    while True:
        async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
            answer = await response.text()
        if response.status == 200:
            return
        if response.status != 429:
            raise MidfillError(f"the server refused {body['n']} answers: {answer}")
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _sample(server: ServedModel, minutes: float) -> _Samples:
    samples = _Samples()
    started = time.monotonic()
    while (now := time.monotonic() - started) < 60 * minutes:
        engine = server.engine_id()
        samples.minutes.append(now / 60)
        samples.server.append(resident_bytes(server.process_id))
        samples.engine.append(0 if engine is None else resident_bytes(engine))
        await asyncio.sleep(_SAMPLE_SECONDS)
    return samples


async def _streams(load: _Load) -> tuple[int, float]:
    """Return how many streams came to their end beside idle connections, and how long all took."""
    server, options, texts = load.server, load.options, load.texts
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    idle = await asyncio.gather(
        *(asyncio.open_connection(host, int(port)) for _ in range(options.idle))
    )
    started = time.perf_counter()
    bodies = [
        {
            "prompt": texts[number % len(texts)][number : number + 400],
            "max_tokens": options.output_tokens,
            "stream": True,
            "ignore_eos": True,
            "midfill": {"trim": False},
        }
        for number in range(options.streams)
    ]
    outcomes = await asyncio.gather(
        *(ask(server.session, server.url, body, 10 * _TIMEOUT) for body in bodies)
    )
    seconds = time.perf_counter() - started
    for _, writer in idle:
        writer.close()
    failed = [outcome for outcome in outcomes if outcome.kind != "complete"]
    load.failures += (
        f"stream: {outcome.kind} {outcome.status} {outcome.detail}" for outcome in failed
    )
    return len(outcomes) - len(failed), seconds


def soak_table(report: SoakReport) -> ResultTable:
    """Return the figures as a table."""
    options = report.options
    before, after = report.descriptors
    sent = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.requests.items()))
    rows = [
        {"": "server's memory", "figure": _grown(report.server_mb, report.server_slope)},
        {"": "engine's memory", "figure": _grown(report.engine_mb, report.engine_slope)},
        {"": "open files, before and after", "figure": f"{before}, {after}"},
        {"": "leaked slots", "figure": f"{report.leaked_slots}"},
        {"": "requests", "figure": sent},
        {"": "failed", "figure": f"{report.failed}"},
        {"": "evicted tokens", "figure": f"{report.evicted:,}"},
        {
            "": f"streams beside {options.idle} idle connections",
            "figure": f"{report.streams_complete} of {options.streams} complete in"
            f" {report.stream_seconds:.1f} s",
        },
    ]
    caption = (
        f"{options.model}, --kv-memory {options.kv_memory} --document-memory"
        f" {options.document_memory}, {options.minutes:g} minutes after all that is bounded was"
        f" filled, {options.clients} clients. On {report.machine}."
    )
    return ResultTable(rows=rows, title="A long run", caption=caption)


def _grown(megabytes: float, slope: float) -> str:
    return f"{megabytes:,.0f} MB, {slope:+.2f} MB/min"


ClientsOption = Annotated[int, typer.Option(min=1, help="Clients that ask all the time.")]

MinutesOption = Annotated[
    float, typer.Option(min=0.01, help="Duration, once the memory of its server has been filled.")
]

KvMemoryOption = Annotated[str, typer.Option(help="--kv-memory of the server.")]

DocumentMemoryOption = Annotated[
    str, typer.Option(help="--document-memory of the server; small, so that it is soon full.")
]

StreamsOption = Annotated[int, typer.Option(min=1, help="Streams at the same time, at the end.")]

IdleOption = Annotated[int, typer.Option(min=0, help="Idle connections meanwhile.")]


def soak(
    model: ModelArgument = None,
    minutes: MinutesOption = 30,
    kv_memory: KvMemoryOption = "256M",
    document_memory: DocumentMemoryOption = "1M",
    clients: ClientsOption = 6,
    streams: StreamsOption = 200,
    idle: IdleOption = 1000,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Run a server under a mixed load for long: memory, open files and slots must not grow."""
    options = SoakOptions(
        model=model or DEFAULT_MODEL,
        minutes=minutes,
        kv_memory=kv_memory,
        document_memory=document_memory,
        clients=clients,
        streams=streams,
        idle=idle,
    )
    with show_steps("starting the server") as say:
        report = asyncio.run(measure_soak(options, say))
    publish(report, soak_table(report), section="soak", json=json, docs=docs)
