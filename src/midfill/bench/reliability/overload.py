"""bench overload: far more requests than can be answered in time, and how many still are.

First, ever more clients that ask one request after the other: the most answers within the deadline
per second is the peak. Then requests arrive at random moments, at a multiple of that rate, whether
or not earlier ones are answered. The load comes from the same machine, and takes time from the
server there.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from midfill.bench.documents import standard_library_documents
from midfill.bench.reliability.asking import Outcome, ask
from midfill.bench.reliability.served import ServedModel, serve_model
from midfill.errors import MidfillError
from midfill.reporting.result_table import ResultTable
from midfill.system.machine import Machine, describe_machine

_HUNG = 3  # deadlines after which a request counts as hung
_IDLE_SECONDS = 60
Say = Callable[[str], None]


class OverloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        model: what is served.
        deadline: seconds for which a client waits for its whole answer.
        factor: multiple of the peak's rate at which requests arrive.
        seconds: for which they do.
        clients: how many ask at once in each part of the search for the peak.
        search_seconds: how long each part takes.
        documents: that the requests are about; each is asked about at a random place.
        characters: of each.
        output_tokens: of each answer.
        seed: chooses documents, places and moments.
    """

    model: str
    deadline: float = 5.0
    factor: float = 10.0
    seconds: float = 40.0
    clients: tuple[int, ...] = (4, 8, 16, 32)
    search_seconds: float = 15.0
    documents: int = 32
    characters: int = 2000
    output_tokens: int = 16
    seed: int = 0


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
    texts = standard_library_documents(options.documents, seed=options.seed)
    texts = [text[: options.characters] for text in texts]
    async with serve_model(options.model, ["--log-level", "warning"]) as server:
        phases: dict[int, Phase] = {}
        for clients in (options.clients[0], *options.clients):  # the first warms up
            say(f"{clients} clients")
            phases[clients] = await _closed_loop(server, options, texts, clients)
        peak_clients = max(phases, key=lambda clients: phases[clients].goodput)
        peak = phases[peak_clients]
        if not peak.goodput:
            raise MidfillError("no answer within the deadline; --deadline allows a longer one")
        rate = options.factor * peak.goodput
        say(f"{rate:.0f} requests per second")
        overload = await _open_loop(server, options, texts, rate)
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


async def _closed_loop(
    server: ServedModel, options: OverloadOptions, texts: Sequence[str], clients: int
) -> Phase:
    outcomes: list[Outcome] = []
    end = time.perf_counter() + options.search_seconds

    async def ask_on(number: int) -> None:
        chance = random.Random(f"{options.seed} {clients} {number}")
        while time.perf_counter() < end:
            outcomes.append(await _ask(server, options, texts, chance))

    await asyncio.gather(*(ask_on(number) for number in range(clients)))
    return _phase(outcomes, options, options.search_seconds)


async def _open_loop(
    server: ServedModel, options: OverloadOptions, texts: Sequence[str], rate: float
) -> Phase:
    chance = random.Random(f"{options.seed} open")
    tasks: list[asyncio.Task[Outcome]] = []
    started = due = time.perf_counter()
    while due < started + options.seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(server, options, texts, chance)))
        due += chance.expovariate(rate)
    outcomes = list(await asyncio.gather(*tasks))
    return _phase(outcomes, options, options.seconds)


async def _ask(
    server: ServedModel, options: OverloadOptions, texts: Sequence[str], chance: random.Random
) -> Outcome:
    text = chance.choice(texts)
    caret = chance.randrange(len(text))
    body: dict[str, Any] = {
        "prompt": text[:caret],
        "suffix": text[caret:],
        "max_tokens": options.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "midfill": {"trim": False},
    }
    headers = {"X-Request-Timeout": f"{options.deadline:g}"}
    return await ask(server.session, server.url, body, _HUNG * options.deadline, headers)


def _phase(outcomes: Sequence[Outcome], options: OverloadOptions, seconds: float) -> Phase:
    answers = [one.seconds for one in outcomes if one.kind == "complete"]
    refusals = [one.seconds for one in outcomes if one.kind == "retry"]
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
        codes=dict(Counter(one.code or one.detail for one in outcomes if one.kind != "complete")),
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
    caption = (
        f"{report.kept:.0%} of the peak's answers within {options.deadline:g} s are left under the"
        f" overload. Seconds; refused then: {codes or 'none'}. {options.model}, texts of"
        f" {options.characters} characters at random carets, answers of {options.output_tokens}"
        f" tokens; the load is made on the same machine, {report.machine}."
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
