"""How many users' documents stay cached in the same memory, by ``--kv-cache-dtype``.

Users type in a document each, in a random order, so whose request comes next was not there for
as long as all others took. Where all documents fit, a request computes what was typed; where they
don't, most requests compute a document anew.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Annotated

import msgspec
import typer

from benchmarks.report import publish
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.config import KVCacheDtypeName
from midfill.llm import LLM, SamplingParams
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, describe_machine, format_size
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

DTYPES: tuple[KVCacheDtypeName, ...] = ("f16", "i8", "i4")
_REQUESTS = 4
"""Of each user; the first opens the document and isn't counted."""
_ANSWER = 8
_SHORTEST, _LONGEST = 2000, 3000


class CachedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of some users with one format.

    Attributes:
        dtype: of the KV cache.
        users: how many there are, each with a document.
        hit_rate: share of prompt tokens that were cached.
        seconds: to the first piece of text, of each request.
    """

    dtype: KVCacheDtypeName
    users: int
    hit_rate: float
    seconds: list[float]


class CachedDocumentsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        memory: bytes of KV.
        prompt_tokens: of a request, the median.
    """

    model: str
    machine: Machine
    memory: int
    prompt_tokens: int
    outcomes: list[CachedOutcome]


def measure_cached_documents(
    model: str,
    *,
    memory: int = 96 << 20,
    users: Sequence[int] = (6, 9, 12, 18, 24, 30),
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CachedDocumentsReport:
    """Let users edit documents with KV of every format, in the same memory.

    Args:
        model: its name or path.
        memory: bytes of KV.
        users: numbers of them.
        threads: of the kernels; None takes all.
        progress: receives what is being done.

    Raises:
        MidfillError: the model can't be found or loaded, or the memory is too small.
    """
    outcomes, lengths = [], list[int]()
    for count in users:
        for dtype in DTYPES:
            progress(f"{count} users, {dtype}")
            with LLM(model, threads=threads, kv_memory=memory, kv_cache_dtype=dtype) as llm:
                outcomes.append(_edit(llm, dtype, count, lengths))
    return CachedDocumentsReport(
        model=model,
        machine=describe_machine(),
        memory=memory,
        prompt_tokens=round(median(lengths)),
        outcomes=outcomes,
    )


def _edit(llm: LLM, dtype: KVCacheDtypeName, users: int, lengths: list[int]) -> CachedOutcome:
    """Run the requests of some users; add the lengths of their prompts to ``lengths``."""
    cached, seconds, first = 0, list[float](), len(lengths)
    for number, asked in enumerate(_requests(users)):
        started = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=_ANSWER)
        stream = llm.infill_stream(asked.prefix, asked.suffix, sampling)
        next(stream, None)
        elapsed = time.perf_counter() - started
        stream.result()
        usage = stream.usage
        if number >= users:
            seconds.append(elapsed)
            cached += usage.cached_tokens
            lengths.append(usage.prompt_tokens)
    return CachedOutcome(
        dtype=dtype, users=users, hit_rate=cached / sum(lengths[first:]), seconds=seconds
    )


def _requests(users: int) -> Iterator[Round]:
    """Yield each user's first request, then all others in a random order."""
    texts = standard_library_documents(users, shortest=_SHORTEST, longest=_LONGEST)
    sessions = [
        edit_session({"document": text}, SESSION_KINDS["typing"], rounds=_REQUESTS, seed=number)
        for number, text in enumerate(texts)
    ]
    yield from (session[0] for session in sessions)
    order = [number for number in range(users) for _ in range(_REQUESTS - 1)]
    random.Random(users).shuffle(order)
    later = [iter(session[1:]) for session in sessions]
    yield from (next(later[number]) for number in order)


def cached_documents_table(report: CachedDocumentsReport) -> ResultTable:
    """A row per number of users, a column per format."""
    rows: dict[int, dict[str, str]] = {}
    for outcome in report.outcomes:
        row = rows.setdefault(outcome.users, {"users": str(outcome.users)})
        milliseconds = median(outcome.seconds) * 1000
        row[f"{outcome.dtype}, cached"] = f"{outcome.hit_rate:.0%}"
        row[f"{outcome.dtype}, TTFT"] = f"{milliseconds:,.0f} ms"
    return ResultTable(
        title="Documents cached in the same memory",
        rows=list(rows.values()),
        caption=f"{report.model}, {format_size(report.memory)} of KV, a document of about"
        f" {report.prompt_tokens:,} tokens each, {_REQUESTS - 1} requests per user in a random"
        f" order after each has opened one; share of prompt tokens that were cached, and median"
        f" time to the first piece of text. {report.machine}.",
    )


def cached_documents(
    model: ModelArgument = None,
    users: Annotated[
        str, typer.Option(help="Numbers of users, separated by commas.")
    ] = "6,9,12,18,24,30",
    mebibytes: Annotated[int, typer.Option(min=16, help="Of KV.")] = 96,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Find how many users' documents stay cached in the same memory, by --kv-cache-dtype."""
    with show_steps("loading") as progress:
        report = measure_cached_documents(
            model or DEFAULT_MODEL,
            memory=mebibytes << 20,
            users=parse_counts(users),
            threads=threads,
            progress=progress,
        )
    table = cached_documents_table(report)
    publish(report, table, section="cached-documents", json=json, docs=docs)
