"""EFIM's rounds load: users whose document grows at the caret, round after round.

Source: "EFIM: Efficient Serving of LLMs for Infilling Tasks with Improved KV Cache Reuse"
(Guo et al., Euro-Par 2025, arXiv 2505.21889), its serving experiment: the suffix is a file's
second half; the prefix starts with a seventh of the first half and grows by a seventh per round;
all users work at once. Here it has fewer users and shorter answers, on files of the standard
library. Three ways of laying prompts out:

    fim     the client sends PRE prefix SUF suffix MID
    efim    the client sends PRE head SUF suffix MID rest, head being the first round's prefix
    native  the client sends prefix and suffix; the server chooses the layout

Every run puts a unique first line into its documents, so that no run finds another's KV.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from statistics import median
from typing import Any, Literal

import msgspec

from midfill.errors import MidfillError
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.clients import Client, Measurement, Sentinels
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.reporting import ResultTable

Layout = Literal["fim", "efim", "native"]
LAYOUTS: tuple[Layout, ...] = ("fim", "efim", "native")
STEPS = 7
"""The prefix grows by this part of the document's first half."""


class RoundsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        layouts: which to measure.
        users: documents edited at once.
        rounds: requests per user, one after the other; at most 7.
        output_tokens: tokens of each answer, end-of-text ignored.
        repeats: runs per layout, in turn; figures are medians.
        sentinels: texts of the PRE, SUF and MID tokens, which ``fim`` and ``efim`` need.
        seed: chooses the files.
        method: compresses the KV of every prompt; "none" keeps it.
    """

    layouts: tuple[Layout, ...] = LAYOUTS
    users: int = 4
    rounds: int = 5
    output_tokens: int = 16
    repeats: int = 3
    sentinels: tuple[str, str, str] | None = None
    seed: int = 0
    method: str = "none"


class LayoutResult(msgspec.Struct, frozen=True, kw_only=True):
    """One layout's figures; seconds are medians over repeats (and users, for TTFT).

    Attributes:
        wall_seconds: from the first request to the end of the last answer.
        requests_per_second: users * rounds / wall_seconds.
        first_ttft_seconds, later_ttft_seconds: of round 1, of the rounds after it.
        first_computed, later_computed: prompt tokens computed per request.
        increment: tokens by which a later round's prompt is longer than the one before.
        most_over_increment: maximum over later rounds of computed tokens less the increment.
        ttft_by_round: seconds, for the plot.
        runs: wall seconds of every run.
    """

    wall_seconds: float
    requests_per_second: float
    first_ttft_seconds: float
    later_ttft_seconds: float
    first_computed: float
    later_computed: float
    increment: float
    most_over_increment: int
    ttft_by_round: list[float]
    runs: list[float]


class RoundsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    options: RoundsOptions
    layouts: dict[str, LayoutResult]


def round_texts(document: str, number: int) -> tuple[str, str, str]:
    """Return head, prefix and suffix of round ``number`` (from 1); head is round 1's prefix."""
    middle = len(document) // 2
    step = middle // STEPS
    return document[:step], document[: step * number], document[middle:]


def layout_fields(
    layout: str, head: str, rest: str, suffix: str, sentinels: Sentinels | None
) -> dict[str, Any]:
    """Return the fields of a request that hold the text around the caret.

    Args:
        layout: "native", "efim", or what begins with the whole prefix.
        head: the prefix before typing.
        rest: what was typed after it.
        suffix: the text after the caret.
        sentinels: PRE, SUF and MID; None is for "native" alone.
    """
    if layout == "native":
        # All layouts show the model the same text: no window of midfill's own.
        return {"prompt": head + rest, "suffix": suffix, "midfill": {"window": "as-sent"}}
    assert sentinels is not None
    pre, suf, mid = sentinels
    before, after = (head, rest) if layout == "efim" else (head + rest, "")
    prompt = f"{pre}{before}{suf}{suffix}{mid}{after}"
    return {"prompt": prompt, "midfill": {"layout": "verbatim"}}


def payload(
    layout: Layout, document: str, number: int, options: RoundsOptions, model: str
) -> dict[str, Any]:
    """Return the body of one request.

    It has no seed: answers are not compared, and vLLM 0.32's engine on a CPU crashes on a sampled
    request with a seed whose prompt takes several steps.
    """
    head, prefix, suffix = round_texts(document, number)
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.output_tokens,
        "ignore_eos": True,
        "temperature": 0.2,
        "top_p": 0.95,
        "top_k": 20,
    }
    return body | layout_fields(layout, head, prefix[len(head) :], suffix, options.sentinels)


async def run_once(
    client: Client, layout: Layout, options: RoundsOptions, model: str
) -> tuple[float, list[list[Measurement]]]:
    """Run all users through all rounds; return wall seconds and measurements [user][round]."""
    mark = f"# {uuid.uuid4()}\n"
    documents = standard_library_documents(options.users, seed=options.seed)

    async def user(document: str) -> list[Measurement]:
        return [
            await client.complete(payload(layout, mark + document, number, options, model))
            for number in range(1, options.rounds + 1)
        ]

    started = time.perf_counter()
    answers = await asyncio.gather(*(user(document) for document in documents))
    return time.perf_counter() - started, list(answers)


def summarise(runs: list[tuple[float, list[list[Measurement]]]]) -> LayoutResult:
    """Return the medians over the runs of one layout."""
    users = [user for _, answers in runs for user in answers]
    rounds = len(users[0])
    pairs = [(user[i - 1], user[i]) for user in users for i in range(1, rounds)]
    increments = [after.prompt_tokens - before.prompt_tokens for before, after in pairs]
    computed = [after.computed_tokens for _, after in pairs]
    walls = [wall for wall, _ in runs]
    later_ttfts = [after.ttft_seconds for _, after in pairs]
    wall = median(walls)
    return LayoutResult(
        wall_seconds=wall,
        requests_per_second=len(runs[0][1]) * rounds / wall,
        first_ttft_seconds=median(user[0].ttft_seconds for user in users),
        later_ttft_seconds=median(later_ttfts) if pairs else 0.0,
        first_computed=median(user[0].computed_tokens for user in users),
        later_computed=median(computed) if pairs else 0.0,
        increment=median(increments) if pairs else 0.0,
        most_over_increment=max(
            (done - grown for done, grown in zip(computed, increments, strict=True)), default=0
        ),
        ttft_by_round=[median(user[i].ttft_seconds for user in users) for i in range(rounds)],
        runs=walls,
    )


async def measure_rounds(
    client: Client,
    options: RoundsOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> RoundsReport:
    """Run every layout ``repeats`` times, in turn, after one small request to warm up.

    Raises:
        MidfillError: the model refuses a request, or a layout needs sentinels that are unknown.
    """
    if options.sentinels is None:
        options = msgspec.structs.replace(options, sentinels=client.sentinels)
    if options.sentinels is None and set(options.layouts) - {"native"}:
        raise MidfillError("fim and efim need the model's FIM tokens: name them with --fim-tokens")
    model = await client.model()
    await client.complete({"model": model, "prompt": "def", "max_tokens": 4})
    runs: dict[str, list[tuple[float, list[list[Measurement]]]]] = {}
    for repeat in range(options.repeats):
        for layout in options.layouts:
            progress(f"{layout}, run {repeat + 1} of {options.repeats}")
            runs.setdefault(layout, []).append(await run_once(client, layout, options, model))
    return RoundsReport(
        model=model,
        machine=describe_machine(),
        options=options,
        layouts={layout: summarise(results) for layout, results in runs.items()},
    )


_LEGEND = (
    "Speed-up: requests/s against fim. Grown by: tokens by which a later round's prompt is longer "
    "than the one before. Later computed: prompt tokens computed in a later round. Most over: "
    "maximum over later rounds of computed tokens less what the prompt had grown by."
)


def rounds_table(report: RoundsReport) -> ResultTable:
    """A row per layout."""
    options = report.options
    method = "" if options.method == "none" else f", KV compressed by {options.method}"
    return ResultTable(
        title="EFIM rounds load",
        rows=[_cells(name, result, report) for name, result in report.layouts.items()],
        caption=f"{report.model}, {options.users} users x {options.rounds} rounds, "
        f"{options.output_tokens} tokens out, median of {options.repeats} runs per layout{method}; "
        f"{report.machine}. {_LEGEND}",
    )


def _cells(name: str, result: LayoutResult, report: RoundsReport) -> dict[str, str]:
    """Cells of a row, with short heads: the table should fit a terminal of 80 columns."""
    base = report.layouts.get("fim")
    speed_up = result.requests_per_second / base.requests_per_second if base else None
    return {
        "layout": name,
        "wall s": f"{result.wall_seconds:.2f}",
        "req/s": f"{result.requests_per_second:.2f}",
        "speed-up": "-" if speed_up is None else f"{speed_up:.2f}x",
        "first TTFT ms": f"{result.first_ttft_seconds * 1000:.0f}",
        "later TTFT ms": f"{result.later_ttft_seconds * 1000:.0f}",
        "grown by": f"{result.increment:.0f}",
        "later computed": f"{result.later_computed:.0f}",
        "most over": f"{result.most_over_increment:+d}",
    }
