"""What ``midfill gateway`` adds to the time of a request: the same load with and without it.

Behind both stands a server without a model (``gateway_stub``), whose answers take a fixed time.
Requests arrive at a fixed rate, whether or not earlier ones are answered, from documents that are
being typed. Without the gateway the client lays the prompt out itself. Both ways are measured in
turn, so that what else the machine does meets both.
"""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import aiohttp
import msgspec
import typer

from benchmarks.report import publish
from midfill.errors import MidfillError
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_KEYSTROKE = 5  # characters between two requests of a document
_FIELDS = {
    "first_p50": "first token, p50",
    "first_p95": "p95",
    "whole_p50": "answer, p50",
    "whole_p95": "answer, p95",
}
_WARM_UP_SECONDS = 2.0
_START_SECONDS = 60


class GatewayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        rate: requests per second.
        seconds: how long each run takes.
        repeats: runs of each way, in turn.
        documents: edited at the same time.
        characters: of each document, before and after the caret together.
        output_tokens: of each answer.
    """

    rate: float = 50.0
    seconds: float = 10.0
    repeats: int = 3
    documents: int = 16
    characters: int = 6000
    output_tokens: int = 16


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of all requests of one way.

    Attributes:
        first_p50, first_p95: until the first token.
        whole_p50, whole_p95: until the end of the answer.
        requests: how many.
    """

    first_p50: float
    first_p95: float
    whole_p50: float
    whole_p95: float
    requests: int


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        load: with which load.
        machine: where.
        direct, gateway: without and with the gateway.
        cpu_ms: processor time of the gateway's process per request, in milliseconds; None where the
            system doesn't tell.
    """

    load: GatewayLoad
    machine: Machine
    direct: Times
    gateway: Times
    cpu_ms: float | None

    @property
    def added_ms(self) -> float:
        """By how much the median answer takes longer with the gateway, in milliseconds."""
        return self.gateway.whole_p50 - self.direct.whole_p50

    @property
    def added_share(self) -> float:
        """The same, of the answer's time without it."""
        return self.added_ms / self.direct.whole_p50


def measure_gateway(load: GatewayLoad) -> GatewayReport:
    """Start a server and a gateway, and measure both ways.

    Raises:
        MidfillError: one of them does not start, or a request fails.
    """
    texts = _documents(load)
    with run_stub_process() as stub, run_gateway_process(stub) as (gateway, process):
        before = _cpu_seconds(process)
        direct, through = asyncio.run(_measure(load, texts, stub, gateway))
        after = _cpu_seconds(process)
    answered = len(through) + int(load.rate * _WARM_UP_SECONDS)
    known = before is not None and after is not None
    return GatewayReport(
        load=load,
        machine=describe_machine(),
        direct=_times(direct),
        gateway=_times(through),
        cpu_ms=1000 * ((after or 0) - (before or 0)) / answered if known else None,
    )


def gateway_table(report: GatewayReport) -> ResultTable:
    """Return the figures as a table."""
    direct, gateway = report.direct, report.gateway
    rows = [_row("server alone", direct), _row("through the gateway", gateway)]
    added = {name: getattr(gateway, name) - getattr(direct, name) for name in _FIELDS}
    rows.append({"": "added", **{_FIELDS[name]: f"{value:.1f}" for name, value in added.items()}})
    cpu = ""
    if report.cpu_ms is not None:
        cpu = f" The gateway's process computes for {report.cpu_ms:.1f} ms per request."
    caption = (
        f"Milliseconds; {report.load.rate:g} requests per second, {gateway.requests} requests each"
        f" way. The median answer takes {report.added_share:.1%} longer.{cpu} On {report.machine}."
    )
    return ResultTable(rows=rows, title="What the gateway adds", caption=caption)


def _row(way: str, times: Times) -> dict[str, str]:
    return {"": way, **{head: f"{getattr(times, name):.1f}" for name, head in _FIELDS.items()}}


def _documents(load: GatewayLoad) -> list[str]:
    found = standard_library_documents(load.documents)
    return [document[: load.characters] for document in found]


async def _measure(
    load: GatewayLoad, texts: Sequence[str], stub: str, gateway: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    direct: list[tuple[float, float]] = []
    through: list[tuple[float, float]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for run in range(load.repeats + 1):
            seconds = load.seconds if run else _WARM_UP_SECONDS
            for url, times in ((stub, direct), (gateway, through)):
                found = await _run(load, texts, session, url, seconds, laid_out=url == stub)
                times += found if run else []
    return direct, through


async def _run(
    load: GatewayLoad,
    texts: Sequence[str],
    session: aiohttp.ClientSession,
    url: str,
    seconds: float,
    *,
    laid_out: bool,
) -> list[tuple[float, float]]:
    """Send requests at the load's rate; return seconds to the first token and to the end."""
    count = int(load.rate * seconds)
    started = time.perf_counter()
    tasks = []
    for number in range(count):
        await asyncio.sleep(max(0.0, started + number / load.rate - time.perf_counter()))
        body = _body(load, texts, number, laid_out=laid_out)
        tasks.append(asyncio.create_task(_ask(session, url, body)))
    return list(await asyncio.gather(*tasks))


def _body(
    load: GatewayLoad, texts: Sequence[str], number: int, *, laid_out: bool
) -> dict[str, Any]:
    """Return a request of a document that has grown since its last one."""
    text = texts[number % len(texts)]
    middle = len(text) // 2
    caret = min(middle + _KEYSTROKE * (number // len(texts)), len(text))
    prefix, suffix = text[:caret], text[caret:]
    body = {"max_tokens": load.output_tokens, "temperature": 0, "stream": True}
    if laid_out:
        pre, suf, mid = _SENTINELS
        return {**body, "prompt": f"{pre}{prefix}{suf}{suffix}{mid}"}
    # What the stub writes is no half word, which would be asked for again.
    own = {"healing": False, "trim": False, "document": str(number % len(texts))}
    return {**body, "prompt": prefix, "suffix": suffix, "midfill": own}


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[float, float]:
    started = time.perf_counter()
    first = None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise MidfillError(f"{url} answers with status {response.status}")
        async for line in response.content:
            if first is None and b'"text":' in line:
                first = time.perf_counter()
    if first is None:
        raise MidfillError(f"{url} answers without a token")
    return first - started, time.perf_counter() - started


def _times(found: Sequence[tuple[float, float]]) -> Times:
    first, whole = ([1000 * each for each in column] for column in zip(*found, strict=True))
    return Times(
        first_p50=median(first),
        first_p95=quantiles(first, n=20)[-1],
        whole_p50=median(whole),
        whole_p95=quantiles(whole, n=20)[-1],
        requests=len(found),
    )


@contextlib.contextmanager
def run_stub_process() -> Iterator[str]:
    """Run the server without a model; yield its URL."""
    with _process([sys.executable, "-m", "benchmarks.gateway_stub"]) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise MidfillError("the server without a model does not start")
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def run_gateway_process(upstream: str, *further: str) -> Iterator[tuple[str, int]]:
    """Run a gateway in front of a server; yield its URL and its process's id.

    Args:
        upstream: the server's URL.
        further: options of the command.

    Raises:
        MidfillError: it does not start.
    """
    options = ["--upstream", upstream, "--port", "0", "--log-level", "warning", *further]
    with _process([sys.executable, "-m", "midfill", "gateway", *options]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r"listens  on (\S+)", line)
            if found is not None:
                yield found[1], process.pid
                return
        raise MidfillError("the gateway does not start")


def _cpu_seconds(process: int) -> float | None:
    """Return the processor time that a process has used; None where that isn't known."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(_START_SECONDS)


RateOption = Annotated[float, typer.Option(min=0.1, help="Requests per second.")]

SecondsOption = Annotated[float, typer.Option(min=0.5, help="Duration of a run.")]

RepeatsOption = Annotated[int, typer.Option(min=1, help="Runs of each way, in turn.")]

TokensOption = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]


def gateway(
    rate: RateOption = 50,
    seconds: SecondsOption = 10,
    repeats: RepeatsOption = 3,
    output_tokens: TokensOption = 16,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure what the gateway adds to a request, in front of a server without a model."""
    load = GatewayLoad(rate=rate, seconds=seconds, repeats=repeats, output_tokens=output_tokens)
    report = measure_gateway(load)
    publish(report, gateway_table(report), section="gateway", json=json, docs=docs)
