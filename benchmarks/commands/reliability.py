"""The commands ``python -m benchmarks kills``, ``overload`` and ``soak``."""

import asyncio
from typing import Annotated, Literal

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import ModelArgument
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.system.reporting.publish import publish

KillsOption = Annotated[int, typer.Option(min=1, help="How often the engine is killed.")]
ClientsOption = Annotated[int, typer.Option(min=1, help="Clients that ask all the time.")]
StepTimeoutOption = Annotated[
    float, typer.Option(min=1, help="--step-timeout of the server, for engines that hang.")
]
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
MinutesOption = Annotated[
    float, typer.Option(min=0.01, help="Duration, once the memory of its server has been filled.")
]
KvMemoryOption = Annotated[str, typer.Option(help="--kv-memory of the server.")]
DocumentMemoryOption = Annotated[
    str, typer.Option(help="--document-memory of the server; small, so that it is soon full.")
]
StreamsOption = Annotated[int, typer.Option(min=1, help="Streams at the same time, at the end.")]
IdleOption = Annotated[int, typer.Option(min=0, help="Idle connections meanwhile.")]


def kills(
    model: ModelArgument = None,
    kills: KillsOption = 100,
    clients: ClientsOption = 6,
    step_timeout: StepTimeoutOption = 4,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Kill a server's engine again and again under load: no answer may be wrong or lost."""
    from benchmarks.reliability.kills import KillOptions, kills_table, measure_kills

    options = KillOptions(
        model=_named(model), kills=kills, clients=clients, step_timeout=step_timeout
    )
    with show_steps("starting the server") as say:
        report = asyncio.run(
            measure_kills(options, lambda done, total: say(f"{done} of {total} kills"))
        )
    table = kills_table(report)
    publish(report, table.drawn(), table.markdown(), section="kills", json=json, docs=docs)
    if report.faults:
        raise typer.Exit(1)


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
    from benchmarks.reliability.overload import (
        OverloadOptions,
        measure_overload,
        overload_table,
    )

    options = OverloadOptions(
        model=_named(model), load=load, deadline=deadline, factor=factor, seconds=seconds
    )
    with show_steps("starting the server") as say:
        report = asyncio.run(measure_overload(options, say))
    table = overload_table(report)
    section = "overload" if load == "carets" else "overload-editors"
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)


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
    from benchmarks.reliability.soak import SoakOptions, measure_soak, soak_table

    options = SoakOptions(
        model=_named(model),
        minutes=minutes,
        kv_memory=kv_memory,
        document_memory=document_memory,
        clients=clients,
        streams=streams,
        idle=idle,
    )
    with show_steps("starting the server") as say:
        report = asyncio.run(measure_soak(options, say))
    table = soak_table(report)
    publish(report, table.drawn(), table.markdown(), section="soak", json=json, docs=docs)


def _named(model: str | None) -> str:
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    return model or DEFAULT_MODEL
