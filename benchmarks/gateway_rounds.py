"""EFIM's rounds load on a real server, with a client that lays prompts out and through the gateway.

See ``rounds`` for the load. All ways run in turn, and each turn begins with another one, so that
what else the machine does meets all of them.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated, Any

import httpx
import msgspec
import typer

from benchmarks.gateway import run_gateway_process
from benchmarks.report import publish
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.serving.gateway.options import address_of
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.clients import SPARE_TOKENS, HttpClient, Measurement, Sentinels
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.rounds import Layout, RoundsOptions, payload
from midfill_lab.cli.bench.options import ClientFimTokensOption, JsonOption, OutputTokensOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

PSM, EFIM = "PSM, laid out by the client", "EFIM, laid out by the client"
GATEWAY, UNHEALED = "gateway", "gateway, half words not healed"
WAYS = (PSM, EFIM, GATEWAY, UNHEALED)

_LAYOUTS: dict[str, Layout] = {PSM: "fim", EFIM: "efim", GATEWAY: "native", UNHEALED: "native"}
# Counters of prompt tokens that were looked up, and of those that were found.
_LOOKED_UP = ("vllm:prefix_cache_queries_total", "llamacpp:prompt_tokens_total")
_FOUND = ("vllm:prefix_cache_hits_total",)
_ASKED_AGAIN = ("midfill:answers_asked_again_total",)


class WayResult(msgspec.Struct, frozen=True, kw_only=True):
    """One way's figures: medians over its runs.

    Attributes:
        wall_seconds: of a run.
        later_ttft_seconds: of requests after a document's first one.
        computed_tokens: of all prompts of a run, by the server's own counters; by its answers'
            usage where it has none.
        asked_again: answers that had to be asked for again, in all runs.
        runs: wall seconds of every run.
    """

    wall_seconds: float
    later_ttft_seconds: float
    computed_tokens: float
    asked_again: int
    runs: list[float]


class GatewayRoundsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        kind: what the server calls itself.
        server: the model, and the server's version.
        machine: where.
        options: the load.
        ways: the figures.
    """

    kind: str
    server: str
    machine: Machine
    options: RoundsOptions
    ways: dict[str, WayResult]

    def share_of_gain(self, way: str, figure: Callable[[WayResult], float]) -> float | None:
        """Return which part a way has of what EFIM's order gains over PSM; None without a gain."""
        psm, efim, own = (figure(self.ways[each]) for each in (PSM, EFIM, way))
        return (psm - own) / (psm - efim) if psm > efim else None


class _Run(msgspec.Struct, frozen=True):
    """One run of one way."""

    wall: float
    answers: list[list[Measurement]]
    computed: float
    asked_again: int


def measure_gateway_rounds(
    upstream: str,
    sentinels: Sentinels,
    options: RoundsOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> GatewayRoundsReport:
    """Start a gateway in front of a server, and measure all ways.

    Raises:
        MidfillError: the server doesn't answer, or the gateway doesn't start.
    """
    options = msgspec.structs.replace(options, sentinels=sentinels)
    with run_gateway_process(upstream, "--fim-tokens", ",".join(sentinels)) as (gateway, _):
        runs = asyncio.run(_measure(upstream, gateway, options, progress))
        kind, server = asyncio.run(_identify(upstream))
    return GatewayRoundsReport(
        kind=kind,
        server=server,
        machine=describe_machine(),
        options=options,
        ways={way: _summarise(runs[way]) for way in WAYS},
    )


async def _measure(
    upstream: str, gateway: str, options: RoundsOptions, progress: Callable[[str], None]
) -> dict[str, list[_Run]]:
    runs: dict[str, list[_Run]] = {way: [] for way in WAYS}
    async with HttpClient(f"{upstream}/v1") as direct, HttpClient(f"{gateway}/v1") as through:
        model = await direct.model()
        for client in (direct, through):
            await client.complete({"model": model, "prompt": "def", "max_tokens": 4})
        for repeat in range(options.repeats):
            first = repeat % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                progress(f"{way}, run {repeat + 1} of {options.repeats}")
                client = through if _LAYOUTS[way] == "native" else direct
                before = await _counts(upstream, gateway)
                wall, answers = await _run(client, way, options, model)
                after = await _counts(upstream, gateway)
                computed = float(sum(answer.computed_tokens for user in answers for answer in user))
                if before[0] is not None and after[0] is not None:
                    computed = after[0] - before[0]
                again = int((after[1] or 0) - (before[1] or 0))
                runs[way].append(_Run(wall, answers, computed, again))
    return runs


async def _run(
    client: HttpClient, way: str, options: RoundsOptions, model: str
) -> tuple[float, list[list[Measurement]]]:
    """Run all users through all rounds."""
    mark = f"# {uuid.uuid4()}\n"
    documents = standard_library_documents(options.users, seed=options.seed)

    async def user(document: str) -> list[Measurement]:
        rounds = range(1, options.rounds + 1)
        bodies = [_body(way, mark + document, number, options, model) for number in rounds]
        return [await client.complete(body) for body in bodies]

    started = time.perf_counter()
    answers = await asyncio.gather(*map(user, documents))
    return time.perf_counter() - started, list(answers)


def _body(
    way: str, document: str, number: int, options: RoundsOptions, model: str
) -> dict[str, Any]:
    body = payload(_LAYOUTS[way], document, number, options, model)
    if way == UNHEALED:
        body["midfill"] = {**body["midfill"], "healing": False}
    return body


async def _counts(upstream: str, gateway: str) -> tuple[float | None, float | None]:
    """Return the server's count of computed prompt tokens, and the gateway's of repeated asks."""
    own, others = await asyncio.gather(_metrics(upstream), _metrics(gateway))
    looked_up, found = _total(own, _LOOKED_UP), _total(own, _FOUND)
    return None if looked_up is None else looked_up - (found or 0), _total(others, _ASKED_AGAIN)


async def _metrics(url: str) -> str:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        try:
            response = await client.get(f"{url}/metrics")
        except httpx.HTTPError as error:
            raise MidfillError(f"{url}/metrics can't be read: {error!r}") from error
        return response.text if response.status_code == 200 else ""


def _total(metrics: str, names: Sequence[str]) -> float | None:
    """Return the sum of a counter's samples; None if there is none of these names."""
    pattern = rf"^(?:{'|'.join(map(re.escape, names))})(?:\{{.*\}})? (\S+)$"
    values = [float(value) for value in re.findall(pattern, metrics, re.MULTILINE)]
    return sum(values) if values else None


async def _identify(upstream: str) -> tuple[str, str]:
    """Return what the server calls itself, and its model's name with its version."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        try:
            models = (await client.get(f"{upstream}/v1/models")).json()
            kind, name = str(models["data"][0]["owned_by"]), str(models["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError, TypeError) as error:
            raise MidfillError(f"no OpenAI-style server at {upstream}: {error!r}") from error
        response = await client.get(f"{upstream}/version")
    version = response.json().get("version") if response.status_code == 200 else None
    return kind, f"{name} on {kind}{f' {version}' if version else ''}"


def _summarise(runs: Sequence[_Run]) -> WayResult:
    later = [answer.ttft_seconds for run in runs for user in run.answers for answer in user[1:]]
    return WayResult(
        wall_seconds=median(run.wall for run in runs),
        later_ttft_seconds=median(later) if later else 0.0,
        computed_tokens=median(run.computed for run in runs),
        asked_again=sum(run.asked_again for run in runs),
        runs=[run.wall for run in runs],
    )


def gateway_rounds_table(report: GatewayRoundsReport) -> ResultTable:
    """Return a row per way."""
    rows = [
        {
            "": way,
            "computed tokens": f"{result.computed_tokens:,.0f}",
            "wall time, s": f"{result.wall_seconds:.1f}",
            "later first tokens, ms": f"{1000 * result.later_ttft_seconds:,.0f}",
            "of EFIM's gain in tokens": _share(
                report, way, lambda figures: figures.computed_tokens
            ),
            "in time": _share(report, way, lambda figures: figures.wall_seconds),
            "asked again": f"{result.asked_again}" if "gateway" in way else "",
        }
        for way, result in report.ways.items()
    ]
    options = report.options
    requests = options.users * options.rounds
    caption = (
        f"{report.server}; {options.users} users, {options.rounds} rounds, {options.output_tokens}"
        f" tokens out; medians of {options.repeats} runs of {requests} requests each way, in turn."
        f" Asked again: of all {requests * options.repeats} answers. On {report.machine}."
    )
    return ResultTable(rows=rows, title="Rounds through the gateway", caption=caption)


def _share(report: GatewayRoundsReport, way: str, figure: Callable[[WayResult], float]) -> str:
    if way in (PSM, EFIM):
        return ""
    share = report.share_of_gain(way, figure)
    return "-" if share is None else f"{share:.0%}"


RepeatsOption = Annotated[int, typer.Option(min=1, help="Runs of each way, in turn.")]

UpstreamArgument = Annotated[
    str, typer.Argument(help="A server that runs, e.g. http://127.0.0.1:8000.")
]


def gateway_rounds(
    upstream: UpstreamArgument,
    fim_tokens: ClientFimTokensOption = None,
    users: Annotated[int, typer.Option(min=1, help="Documents edited at once.")] = 4,
    rounds: Annotated[int, typer.Option(min=2, max=7, help="Requests per user.")] = 4,
    output_tokens: OutputTokensOption = 4,
    repeats: RepeatsOption = 4,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure EFIM's load on a server, laid out by the client and through a gateway.

    The gateway is started for it. --docs writes a section for each kind of server.
    """
    options = RoundsOptions(
        users=users, rounds=rounds, output_tokens=output_tokens, repeats=repeats
    )
    with show_steps("starting the gateway") as progress:
        report = measure_gateway_rounds(
            address_of(upstream), fim_tokens or SPARE_TOKENS, options, progress
        )
    section = f"gateway-rounds-{report.kind}"
    publish(report, gateway_rounds_table(report), section=section, json=json, docs=docs)
