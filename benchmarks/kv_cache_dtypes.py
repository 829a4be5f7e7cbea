"""Decode and prefill by ``--kv-cache-dtype``: the same steps, one format after the other.

The KV is that of real source text, so that it comes from memory and not from pages of zeros.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import typer

from benchmarks.report import publish
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import KVCacheDtypeName
from midfill.errors import OptionError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner, slot_bytes
from midfill.runners.forward.batch import ForwardBatch
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import unseen_documents
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

DTYPES: tuple[KVCacheDtypeName, ...] = ("f16", "bf16", "i8", "i4")
"""What is compared; ratios are to the first."""
_CHUNK = 512
_PREFILL_ROWS = 256


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one kind of step.

    Attributes:
        step: what it runs.
        rows: tokens that it computes.
        seconds: of a step, by format, in each round.
    """

    step: str
    rows: int
    seconds: dict[KVCacheDtypeName, list[float]]


class KVCacheDtypesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        threads: of the kernels.
        slot_bytes: of a token's KV, by format.
        rounds: in each of which all formats take their turn.
    """

    model: str
    machine: Machine
    threads: int
    slot_bytes: dict[KVCacheDtypeName, int]
    rounds: int
    steps: list[StepTimes]


def measure_kv_cache_dtypes(
    model: str,
    *,
    contexts: Sequence[int] = (500, 2000, 6000, 8000),
    rounds: int = 15,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> KVCacheDtypesReport:
    """Time steps with KV of every format.

    Args:
        model: its name or path.
        contexts: tokens before the one that is decoded, ascending; a prefill of 256 tokens is
            timed at the end of the last one.
        rounds: how often each is timed.
        threads: of the kernels; None takes all.
        progress: receives what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    progress(f"loading {model}")
    checkpoint = open_checkpoint(resolve(model))
    longest = contexts[-1]
    if checkpoint.config.context < longest:
        raise OptionError(f"contexts of {longest} tokens: the model's is shorter")
    ids = np.concatenate([checkpoint.tokenizer.encode(text) for text in unseen_documents(60).texts])
    ids = np.resize(ids.astype(np.int32), longest)
    runners = {
        dtype: CpuRunner.load(checkpoint, slots=longest, threads=threads, kv_cache_dtype=dtype)
        for dtype in DTYPES
    }
    for dtype, runner in runners.items():
        progress(f"computing the context: {dtype}")
        for start in range(0, longest, _CHUNK):
            runner.forward(_rows(ids, start, min(start + _CHUNK, longest)))
    batches = {f"decode after {each:,}": _rows(ids, each - 1, each) for each in contexts}
    rows = min(_PREFILL_ROWS, longest)
    batches[f"prefill {rows} after {longest - rows:,}"] = _rows(ids, longest - rows, longest)
    steps = [_time(name, batch, runners, rounds, progress) for name, batch in batches.items()]
    used = next(iter(runners.values())).threads
    for runner in runners.values():
        runner.close()
    return KVCacheDtypesReport(
        model=model,
        machine=describe_machine(),
        threads=used,
        slot_bytes={
            dtype: slot_bytes(checkpoint.config, runner.kv_cache_dtype)
            for dtype, runner in runners.items()
        },
        rounds=rounds,
        steps=steps,
    )


def _rows(ids: npt.NDArray[np.int32], start: int, end: int) -> ForwardBatch:
    """Return the step that computes tokens start to end of a text; its KV has the first slots."""
    rows = np.arange(start, end, dtype=np.int32)
    return ForwardBatch(
        token_ids=ids[rows],
        positions=rows,
        write_slots=rows,
        query_indptr=np.array([0, len(rows)], np.int32),
        kv_indptr=np.array([0, end], np.int32),
        kv_slots=np.arange(end, dtype=np.int32),
        logit_rows=np.array([len(rows) - 1], np.int32),
    )


def _time(
    name: str,
    batch: ForwardBatch,
    runners: dict[KVCacheDtypeName, CpuRunner],
    rounds: int,
    progress: Callable[[str], None],
) -> StepTimes:
    """Time one kind of step, ten decodes or one prefill at a time."""
    repeats = 10 if batch.rows == 1 else 1
    seconds: dict[KVCacheDtypeName, list[float]] = {dtype: [] for dtype in runners}
    for number in range(rounds):
        progress(f"{name}: round {number + 1} of {rounds}")
        for dtype, runner in runners.items():
            started = time.perf_counter()
            for _ in range(repeats):
                runner.forward(batch)
            seconds[dtype].append((time.perf_counter() - started) / repeats)
    return StepTimes(step=name, rows=batch.rows, seconds=seconds)


def kv_cache_dtypes_table(report: KVCacheDtypesReport) -> ResultTable:
    """A row per kind of step, a column per format."""
    first = DTYPES[0]
    sizes: dict[str, str] = {
        dtype: f"{size:,} ({report.slot_bytes[first] / size:.2f}x fewer)"
        for dtype, size in report.slot_bytes.items()
    }
    rows: list[dict[str, str]] = [{"": "bytes per token", **sizes}]
    for step in report.steps:
        cells = {"": f"{step.step}, tokens/s"}
        for dtype, seconds in step.seconds.items():
            pairs = zip(step.seconds[first], seconds, strict=True)
            ratio = median(base / own for base, own in pairs)
            cells[dtype] = f"{step.rows / median(seconds):,.0f} ({ratio:.2f}x)"
        rows.append(cells)
    return ResultTable(
        title="Speed by KV format",
        rows=rows,
        caption=f"{report.model}, one stream, {report.threads} threads; medians of"
        f" {report.rounds} rounds in turn, ratios to {first} in the same round."
        f" {report.machine}.",
    )


def kv_cache_dtypes(
    model: ModelArgument = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each step is timed.")] = 15,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Time decode and prefill with KV in each format of --kv-cache-dtype, in turn."""
    with show_steps("loading") as progress:
        report = measure_kv_cache_dtypes(
            model or DEFAULT_MODEL, rounds=rounds, threads=threads, progress=progress
        )
    table = kv_cache_dtypes_table(report)
    publish(report, table, section="kv-cache-dtypes", json=json, docs=docs)
