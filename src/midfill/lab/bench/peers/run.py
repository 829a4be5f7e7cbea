"""A server's run through the loads: started, warmed up, measured, and ended in any case."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

from midfill.errors import MidfillError
from midfill.lab.bench.clients import HttpClient
from midfill.lab.bench.peers.compared_model import ComparedModel
from midfill.lab.bench.peers.loads import Load, Subject, loads_for, warm_up
from midfill.lab.bench.peers.process import ServerProcess, free_port
from midfill.lab.bench.peers.results import Figure, PeersOptions, ServerResult
from midfill.lab.bench.peers.servers import PORT, Launch, ReadBytes
from midfill.lab.bench.prompts import Prompts
from midfill.lab.bench.roofline import measure_roofline

LogLine = Callable[[str], None]

_SETTLE_SECONDS = 0.5
T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """The work of every server.

    Attributes:
        model: the model.
        prompts: made with its tokenizer.
        options: the loads.
        progress: receives what is being done.
    """

    model: ComparedModel
    prompts: Prompts
    options: PeersOptions
    progress: LogLine


@dataclass
class _Findings:
    """The results of a run so far, kept when it ends early."""

    bytes_per_second: float
    figures: list[Figure] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    error: str = ""
    more_tokens: int = 0
    ready_seconds: float | None = None
    peak_rss_bytes: int | None = None
    read_bytes: ReadBytes = field(default_factory=lambda: ReadBytes(0, 0))


class _RunOverError(MidfillError):
    """The server has ended or doesn't answer."""


def run_server(launch: Launch, work: Work, log: Path) -> ServerResult:
    """Run one server from start to end; its failure is part of the result.

    Args:
        log: a new file for its output.
    """
    work.progress(f"{launch.name}: memory bandwidth")
    found = _Findings(measure_roofline(work.options.threads).bytes_per_second)
    try:
        _start_and_measure(launch, work, log, found)
    except MidfillError as error:
        found.error = str(error)
    return ServerResult(
        name=launch.name,
        version=launch.version,
        precision=launch.precision,
        settings=launch.settings,
        ready_seconds=found.ready_seconds,
        peak_rss_bytes=found.peak_rss_bytes,
        weight_bytes=found.read_bytes.weights,
        kv_bytes_per_token=found.read_bytes.kv_per_token,
        bytes_per_second=found.bytes_per_second,
        figures=found.figures,
        skipped=found.skipped,
        error=found.error,
        more_tokens=found.more_tokens,
    )


def _process(launch: Launch, log: Path) -> ServerProcess:
    port = free_port()
    command = [str(port) if argument == PORT else argument for argument in launch.command]
    return ServerProcess(command, launch.environment, port, log)


def _start_and_measure(launch: Launch, work: Work, log: Path, found: _Findings) -> None:
    if launch.first_start:
        work.progress(f"{launch.name}: first start")
        with _process(launch, log) as process:
            process.wait_until_ready(work.options.start_limit)
    with _process(launch, log) as process:
        try:
            work.progress(f"{launch.name}: starting")
            found.ready_seconds = process.wait_until_ready(work.options.start_limit)
            found.read_bytes = launch.read_bytes(process.log_text())
            asyncio.run(_measure(process, launch, work, found))
        except _RunOverError as error:
            raise MidfillError(f"{error}; {process.last_words()}") from None
        finally:
            found.peak_rss_bytes = process.peak_rss_bytes


async def _measure(process: ServerProcess, launch: Launch, work: Work, found: _Findings) -> None:
    def bound(context: float, streams: int) -> float:
        read = found.read_bytes
        step = read.weights + streams * context * read.kv_per_token
        return found.bytes_per_second * streams / step

    limit = work.options.load_limit
    async with HttpClient(f"{process.url}/v1", timeout=limit) as client:
        client.sentinels = work.model.sentinels
        subject = Subject(
            client=client,
            model=work.model.name,
            bound=bound,
            progress=lambda what: work.progress(f"{launch.name}: {what}"),
        )
        found.more_tokens = await _attempt(process, "warming up", warm_up(subject, work.prompts))
        for load in loads_for(work.options, work.prompts, launch.layouts):
            if load.kind not in launch.kinds:
                continue
            reason = reason_to_skip(load, work.model.context, found.figures, limit)
            if reason is None:
                try:
                    found.figures += await _attempt(process, load.name, load.run(subject))
                    continue
                except _RunOverError:
                    raise
                except MidfillError as error:
                    reason = str(error)
            found.skipped[load.name] = reason


async def _attempt(process: ServerProcess, what: str, asked: Awaitable[T]) -> T:
    """Await a request or a load.

    Raises:
        _RunOverError: it failed because the server has ended or doesn't answer.
        MidfillError: it failed otherwise.
    """
    try:
        return await asked
    except MidfillError as error:
        await asyncio.sleep(_SETTLE_SECONDS)  # a dying server ends a moment after its connections
        silent = isinstance(error.__cause__, httpx.TimeoutException)
        if silent or not process.running:
            raise _RunOverError(f"{what}: {error}") from None
        raise


def reason_to_skip(load: Load, context: int, figures: Sequence[Figure], limit: float) -> str | None:
    """Return why a load should be skipped, or None.

    Args:
        context: maximum tokens of a sequence.
        figures: measured before; those of prefill tell how fast prompts are computed.
        limit: maximum seconds for a load's prompts.
    """
    if load.sequence > context:
        return f"takes {load.sequence:,} tokens, the model has {context:,}"
    rates = [one.median for one in figures if one.kind == "prefill"]
    if load.kind == "prefill" or not rates:
        return None
    seconds = load.prompt_tokens / min(rates)
    if seconds <= limit:
        return None
    return f"its prompts would take about {seconds:,.0f} s, more than the limit of {limit:,.0f} s"
