"""bench kills: an engine that is killed again and again under load, and what its clients see.

The answers are known before: the same requests were answered by an engine that nobody killed, and
greedy answers do not change by a bit. So every character can be compared, those of streams that
were cut off as well.
"""

import asyncio
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.reliability.asking import Outcome, ask
from benchmarks.reliability.served import ServedModel, serve_model
from benchmarks.report import publish
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}
_IDLE_SECONDS = 60
_RETRY_SECONDS = 0.25  # less than asked for, so that the restarting server is tried


class KillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load, and how the engine is killed.

    Attributes:
        model: what is served.
        kills: how often.
        signals: by which signals, in turn; SIGSTOP is an engine that hangs.
        clients: how many send requests all the time; every second one streams.
        documents: that they ask about.
        characters: of each.
        output_tokens: of each answer.
        timeout: seconds after which a request counts as hung.
        step_timeout: of the server; what an engine that was stopped adds to its restart.
        warm_tier_memory: of the server; the next engine finds KV there.
        seed: chooses documents and moments.
    """

    model: str
    kills: int = 100
    signals: tuple[str, ...] = ("SIGKILL", "SIGSEGV", "SIGKILL", "SIGSTOP")
    clients: int = 6
    documents: int = 8
    characters: int = 1500
    output_tokens: int = 48
    timeout: float = 60.0
    step_timeout: float = 4.0
    warm_tier_memory: str = "256M"
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [each for each in self.signals if each not in _SIGNALS]
        if unknown or not self.signals:
            raise MidfillError(f"signals are some of {', '.join(_SIGNALS)}, not {unknown}")


class KillReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen.

    Attributes:
        options: with which load.
        machine: where.
        kills: how often the engine was killed.
        complete: answers that came to their end.
        retryable: requests that failed with an error that says when to try again.
        cut_off: how many of these had begun to answer.
        wrong: answers, or parts of answers, with a wrong character.
        hung: requests without an end.
        failed: requests that failed in any other way.
        leaked_slots: KV slots in use when nothing was in progress any more.
        back_p50, back_max: seconds from a kill until a new request was answered.
        cached_after: median share of a warm document's prompt that was found in the cache when it
            was asked for again after a kill.
        failures: what some of ``failed`` said.
    """

    options: KillOptions
    machine: Machine
    kills: int
    complete: int
    retryable: int
    cut_off: int
    wrong: int
    hung: int
    failed: int
    leaked_slots: int
    back_p50: float
    back_max: float
    cached_after: float
    failures: list[str]

    @property
    def faults(self) -> list[str]:
        """What was seen that must not be."""
        found = {
            "wrong answers": self.wrong,
            "hung requests": self.hung,
            "failures that can't be retried": self.failed,
            "leaked slots": self.leaked_slots,
        }
        return [f"{count} {what}" for what, count in found.items() if count]


@dataclass
class _Load:
    """Clients that ask all the time, and what became of their requests."""

    server: ServedModel
    options: KillOptions
    bodies: list[dict[str, Any]]
    truth: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    wrong: int = 0
    in_flight: int = 0
    over: bool = False

    async def run_client(self, number: int) -> None:
        chance = random.Random(f"{self.options.seed} {number}")
        while not self.over:
            place = chance.randrange(len(self.bodies))
            self.in_flight += 1
            outcome = await self.ask(place, streamed=number % 2 == 1)
            self.in_flight -= 1
            self.outcomes.append(outcome)
            if outcome.kind == "retry":
                await asyncio.sleep(_RETRY_SECONDS)

    async def ask(self, place: int, *, streamed: bool) -> Outcome:
        body = {**self.bodies[place], "stream": streamed}
        outcome = await ask(self.server.session, self.server.url, body, self.options.timeout)
        expected = self.truth[place]
        is_right = outcome.text == expected
        if outcome.kind != "complete":
            is_right = expected.startswith(outcome.text)
        self.wrong += not is_right
        return outcome


async def measure_kills(options: KillOptions, progress: Any = None) -> KillReport:
    """Serve a model, kill its engine again and again, and report what clients saw.

    Args:
        options: the load.
        progress: called with (done, total) kills.

    Raises:
        MidfillError: the server does not start, or the engine does not come back.
    """
    texts = standard_library_documents(options.documents, seed=options.seed)
    bodies = [_body(text[: options.characters], options) for text in texts]
    flags = ["--step-timeout", f"{options.step_timeout:g}", "--log-level", "warning"]
    flags += ["--warm-tier-memory", options.warm_tier_memory]
    async with serve_model(options.model, flags) as server:
        load = _Load(server, options, bodies)
        for body in bodies:
            answer = await ask(server.session, server.url, body, options.timeout)
            if answer.kind != "complete":
                raise MidfillError(f"the model does not answer: {answer.detail}")
            load.truth.append(answer.text)
        clients = [asyncio.create_task(load.run_client(n)) for n in range(options.clients)]
        back, cached = [], []
        chance = random.Random(options.seed)
        try:
            for kill in range(options.kills):
                await asyncio.sleep(chance.uniform(0.05, 1.0))
                signal_name = options.signals[kill % len(options.signals)]
                seconds, share = await _kill(load, _SIGNALS[signal_name], kill)
                back.append(seconds)
                cached.append(share)
                if progress is not None:
                    progress(kill + 1, options.kills)
        finally:
            load.over = True
            await asyncio.gather(*clients)
        idle = await server.wait_until_idle(_IDLE_SECONDS)
        leaked = await server.leaked_slots()
    return _report(options, load, back, cached, leaked if idle else -1)


async def _kill(load: _Load, number: signal.Signals, kill: int) -> tuple[float, float]:
    """Kill the engine; return seconds until a new answer, and how much of its prompt was cached."""
    server = load.server
    engine = server.engine_id()
    if engine is None:
        raise MidfillError("there is no engine to kill")
    started = time.perf_counter()
    os.kill(engine, number)
    place = kill % len(load.bodies)
    while True:
        outcome = await load.ask(place, streamed=False)
        load.outcomes.append(outcome)
        # Answered by the engine that was killed, if it had finished already.
        if outcome.kind == "complete" and server.engine_id() not in (engine, None):
            return time.perf_counter() - started, outcome.cached or 0.0
        if time.perf_counter() - started > 3 * load.options.timeout:
            raise MidfillError(f"the engine did not come back: {outcome.detail}")
        await asyncio.sleep(_RETRY_SECONDS)


def _body(text: str, options: KillOptions) -> dict[str, Any]:
    middle = len(text) // 2
    return {
        "prompt": text[:middle],
        "suffix": text[middle:],
        "max_tokens": options.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _report(
    options: KillOptions, load: _Load, back: list[float], cached: list[float], leaked: int
) -> KillReport:
    kinds = [outcome.kind for outcome in load.outcomes]
    failed = [outcome for outcome in load.outcomes if outcome.kind == "failed"]
    return KillReport(
        options=options,
        machine=describe_machine(),
        kills=len(back),
        complete=kinds.count("complete"),
        retryable=kinds.count("retry"),
        cut_off=sum(outcome.kind == "retry" and outcome.status == 200 for outcome in load.outcomes),
        wrong=load.wrong,
        hung=kinds.count("hung"),
        failed=len(failed),
        leaked_slots=leaked,
        back_p50=statistics.median(back),
        back_max=max(back),
        cached_after=statistics.median(cached),
        failures=[outcome.detail for outcome in failed[:5]],
    )


def kills_table(report: KillReport) -> ResultTable:
    """Return the figures as a table."""
    rows = [
        {"": "kills", "number": f"{report.kills:,}"},
        {"": "complete answers", "number": f"{report.complete:,}"},
        {"": "failed, to be tried again", "number": f"{report.retryable:,}"},
        {"": "of these, with an answer begun", "number": f"{report.cut_off:,}"},
        {"": "failed otherwise", "number": f"{report.failed:,}"},
        {"": "wrong answers or parts", "number": f"{report.wrong:,}"},
        {"": "hung requests", "number": f"{report.hung:,}"},
        {"": "leaked slots", "number": f"{report.leaked_slots:,}"},
        {"": "back after, median", "number": f"{report.back_p50:.1f} s"},
        {"": "back after, maximum", "number": f"{report.back_max:.1f} s"},
        {"": "of a warm prompt cached then", "number": f"{report.cached_after:.0%}"},
    ]
    options = report.options
    caption = (
        f"{options.model}, {options.clients} clients that ask all the time, answers of"
        f" {options.output_tokens} tokens; the engine is ended by {', '.join(options.signals)} in"
        f" turn (--step-timeout {options.step_timeout:g}, --warm-tier-memory"
        f" {options.warm_tier_memory}). On {report.machine}."
    )
    return ResultTable(rows=rows, title="An engine that is killed under load", caption=caption)


KillsOption = Annotated[int, typer.Option(min=1, help="How often the engine is killed.")]

ClientsOption = Annotated[int, typer.Option(min=1, help="Clients that ask all the time.")]

StepTimeoutOption = Annotated[
    float, typer.Option(min=1, help="--step-timeout of the server, for engines that hang.")
]


def kills(
    model: ModelArgument = None,
    kills: KillsOption = 100,
    clients: ClientsOption = 6,
    step_timeout: StepTimeoutOption = 4,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Kill a server's engine again and again under load: no answer may be wrong or lost."""
    options = KillOptions(
        model=model or DEFAULT_MODEL, kills=kills, clients=clients, step_timeout=step_timeout
    )
    with show_steps("starting the server") as say:
        report = asyncio.run(
            measure_kills(options, lambda done, total: say(f"{done} of {total} kills"))
        )
    publish(report, kills_table(report), section="kills", json=json, docs=docs)
    if report.faults:
        raise typer.Exit(1)
