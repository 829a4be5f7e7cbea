"""BatchLLM's order against the order of the file: tokens per second of a batch on the real engine.

The load is what Zheng et al. (BatchLLM, arXiv 2412.03594) made theirs for: prompts of several
tasks, each with a long prefix of its own, shuffled, and more of them than the KV pool holds. One
engine runs the batch in both ways, in turn:

    batchllm  as ``midfill batch`` does: prompts that share a prefix together, planning included
    fcfs      first come, first served: all rows are queued in the file's order, and the engine
              admits as many as fit; its prefix cache keeps what was used last

Every run puts a unique first line into its prefixes, so that no run finds another's KV.
"""

import asyncio
import json
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from midfill.errors import MidfillError, OptionError
from midfill.models.checkpoints.model_store import resolve
from midfill.serving.options import ServeOptions
from midfill.serving.server.batch.api import InProcessApi
from midfill.serving.server.batch.job import BatchJob, PlannedPrompt
from midfill.serving.server.batch.opening import open_row_service
from midfill.serving.server.batch.prefix_groups import find_prefix_groups
from midfill.serving.server.batch.results import ResultFile
from midfill.serving.server.batch.row_budget import RowBudget
from midfill.serving.server.batch.rows import RowFile
from midfill.serving.server.offline_batch import for_throughput
from midfill.serving.server.opened_model import open_engine
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.reporting import ResultTable

Order = Literal["batchllm", "fcfs"]
ORDERS: tuple[Order, ...] = ("batchllm", "fcfs")
_URL = "/v1/completions"


class BatchLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The batch, and how often it is run.

    Attributes:
        prefixes: tasks.
        rows: of each task.
        prefix_characters, rest_characters: of each prompt.
        output_tokens: tokens of each answer, end-of-text ignored.
        repeats: runs of each order, in turn.
        seed: chooses the texts and shuffles the rows.
    """

    prefixes: int = 8
    rows: int = 8
    prefix_characters: int = 2000
    rest_characters: int = 200
    output_tokens: int = 16
    repeats: int = 3
    seed: int = 0


class BatchRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one run took and computed."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts, cached ones included, and of answers."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds


class BatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        slots: size of the KV pool in tokens.
        distinct_tokens: of all prompts and answers, shared prefixes counted once.
        runs: by order, the first ones beside each other.
    """

    model: str
    machine: Machine
    load: BatchLoad
    backend: str
    slots: int
    distinct_tokens: int
    runs: dict[Order, list[BatchRun]]

    @property
    def ratios(self) -> list[float]:
        """How many times as many tokens per second BatchLLM's order had, per pair of runs."""
        pairs = zip(self.runs["batchllm"], self.runs["fcfs"], strict=True)
        return [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]


def batch_rows(load: BatchLoad) -> list[bytes]:
    """Return the bodies of a batch's rows in the order of its file, with a new mark."""
    rng = random.Random(load.seed)
    mark = uuid.uuid4().hex
    texts = standard_library_documents(load.prefixes, seed=load.seed)
    prefixes = [
        f"# {mark} {number}\n{_excerpt(text, load.prefix_characters, 0)}"
        for number, text in enumerate(texts)
    ]
    bodies = [
        {
            "prompt": prefix + f"\n# {row}\n" + _excerpt(text, load.rest_characters, row + 1),
            "max_tokens": load.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        for prefix, text in zip(prefixes, texts, strict=True)
        for row in range(load.rows)
    ]
    rng.shuffle(bodies)
    return [json.dumps(body).encode() for body in bodies]


def _excerpt(text: str, characters: int, number: int) -> str:
    """Return a part of a text that is repeated as often as it takes."""
    start = number * 997 % len(text)
    repeated = text[start:] + text * (characters // len(text) + 1)
    return repeated[:characters]


def measure_batch(
    options: ServeOptions, load: BatchLoad, progress: Callable[[str], None] = lambda _: None
) -> BatchReport:
    """Run a batch in both orders, in turn.

    Args:
        options: what runs it and how.
        load: the batch.
        progress: called with what is being done.

    Raises:
        OptionError: the batch fits into the KV pool.
        MidfillError: the model can't be found or loaded, or a row has no answer.
    """
    path = resolve(options.model)
    return asyncio.run(_measure(for_throughput(options), path, load, progress))


async def _measure(
    options: ServeOptions, path: Path, load: BatchLoad, progress: Callable[[str], None]
) -> BatchReport:
    progress(f"loading {options.model}")
    async with open_engine(options, path) as opened:
        service = await open_row_service(options, opened)
        with closing(service):
            api, slots = InProcessApi(service), opened.info.slots
            distinct = await _distinct_tokens(api, batch_rows(load))
            if distinct <= slots:
                raise OptionError(
                    f"the batch has {distinct} different tokens and fits into the KV pool of"
                    f" {slots}; choose a smaller --kv-memory or more --prefixes"
                )
            runs: dict[Order, list[BatchRun]] = {order: [] for order in ORDERS}
            await _run_in_file_order(api, batch_rows(load)[:8])
            for repeat in range(load.repeats):
                for order in ORDERS:
                    progress(f"run {repeat + 1} of {load.repeats}: {order}")
                    rows = batch_rows(load)
                    runs[order].append(
                        await _run_in_file_order(api, rows)
                        if order == "fcfs"
                        else await _run_as_batch(api, rows, slots, service.max_body_bytes)
                    )
    return BatchReport(
        model=options.model,
        machine=describe_machine(),
        load=load,
        backend=opened.info.backend,
        slots=slots,
        distinct_tokens=distinct,
        runs=runs,
    )


async def _distinct_tokens(api: InProcessApi, rows: Sequence[bytes]) -> int:
    """Return how many tokens a batch has where what is shared counts once."""
    planned = [await api.plan(_URL, row) for row in rows]
    prompts = [each for each in planned if isinstance(each, PlannedPrompt)]
    if len(prompts) < len(planned):
        raise MidfillError("a row of the batch can't be answered; make its prompts shorter")
    saving = sum(group.saving for group in find_prefix_groups([each.tokens for each in prompts]))
    return sum(each.prompt_tokens + each.output_tokens for each in prompts) - saving


async def _run_as_batch(
    api: InProcessApi, rows: Sequence[bytes], slots: int, max_body_bytes: int
) -> BatchRun:
    """Run a batch as ``midfill batch`` does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.jsonl")
        source.write_bytes(
            b"".join(
                b'{"custom_id":"%d","method":"POST","url":"%s","body":%s}\n'
                % (number, _URL.encode(), row)
                for number, row in enumerate(rows)
            )
        )
        file, results = RowFile(source, max_body_bytes), ResultFile(Path(folder, "out.jsonl"))
        with closing(file), closing(results):
            started = time.perf_counter()
            done = await BatchJob(file, results, api, RowBudget(slots)).run()
            seconds = time.perf_counter() - started
    if done.failed:
        raise MidfillError(f"{done.failed} rows of the batch have no answer")
    return BatchRun(
        seconds=seconds,
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        output_tokens=done.output_tokens,
    )


async def _run_in_file_order(api: InProcessApi, rows: Sequence[bytes]) -> BatchRun:
    """Have the engine queue all rows, and admit them as they came."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(api.answer(_URL, row) for row in rows))
    seconds = time.perf_counter() - started
    if any(answer.status >= 400 for answer in answers):
        raise MidfillError("a row of the batch has no answer")
    usages = [json.loads(answer.body)["usage"] for answer in answers]
    return BatchRun(
        seconds=seconds,
        prompt_tokens=sum(usage["prompt_tokens"] for usage in usages),
        cached_tokens=sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
        output_tokens=sum(usage["completion_tokens"] for usage in usages),
    )


def batch_table(report: BatchReport) -> ResultTable:
    """A row per order."""
    load, rows = report.load, []
    for order, runs in report.runs.items():
        rates = [run.tokens_per_second for run in runs]
        shared = median(run.cached_tokens / run.prompt_tokens for run in runs)
        rows.append(
            {
                "order": order,
                "tokens/s": f"{median(rates):,.0f}",
                "slowest": f"{min(rates):,.0f}",
                "fastest": f"{max(rates):,.0f}",
                "seconds": f"{median(run.seconds for run in runs):.1f}",
                "of prompts cached": f"{shared:.0%}",
            }
        )
    ratios = report.ratios
    return ResultTable(
        title="A batch with shared prefixes",
        rows=rows,
        caption=f"BatchLLM's order: {median(ratios):.2f} times as fast ({min(ratios):.2f} to"
        f" {max(ratios):.2f}). {report.model}, {load.prefixes} prefixes of"
        f" {load.prefix_characters} characters with {load.rows} rows each, shuffled,"
        f" {load.output_tokens} tokens out; {report.distinct_tokens:,} different tokens, KV pool of"
        f" {report.slots:,}; median of {load.repeats} runs in turn; {report.backend};"
        f" {report.machine}.",
    )
