"""What rounding costs: the CPU kernels' next-token distributions beside those of float32.

The model goes without the adapter that a registered one has, over files of libraries that no
adapter was trained on: an adapter would know its own training data.
"""

import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import typer

from benchmarks.report import publish
from midfill.arrays import Float32Array
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import KVCacheDtypeName, WeightsOption
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner, choose_kv_cache_dtype
from midfill.runners.cpu.weight_packing import block_format
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import unseen_documents
from midfill_lab.cli.bench.options import (
    JsonOption,
)
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

IdArray = npt.NDArray[np.int32]

_CHUNK = 64
"""Rows per step: logits of more would not fit into the caches."""


class Variant(msgspec.Struct, frozen=True):
    """How weights and KV are stored in memory; "auto" is what ``midfill serve`` does."""

    weights: WeightsOption
    kv: KVCacheDtypeName


REFERENCE = Variant("f32", "f32")
VARIANTS = (
    Variant("auto", "auto"),
    Variant("auto", "f32"),
    Variant("auto", "f16"),
    Variant("auto", "bf16"),
    Variant("auto", "i8"),
    Variant("auto", "i4"),
    Variant("q8", "f16"),
    Variant("q4", "f16"),
    Variant("f32", "f16"),
    Variant("f32", "bf16"),
    Variant("f32", "i8"),
    Variant("f32", "i4"),
)


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """A variant's divergence from float32, over all tokens.

    Attributes:
        weights, kv: the formats in memory; what "auto" chose.
        mean, median, p99: Kullback-Leibler divergence of next-token distributions, from float32's
            to the variant's, in nats per token.
        agreement: share of positions with the same most likely next token.
        perplexity: of the text.
    """

    variant: Variant
    weights: str
    kv: str
    mean: float
    median: float
    p99: float
    agreement: float
    perplexity: float


class PrecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        stored: the format of the layers' weights in the checkpoint.
        text: where the text comes from.
        tokens: how many were compared.
        window: maximum tokens of each file, from its beginning.
        perplexity: of the text, in float32.
    """

    model: str
    machine: Machine
    stored: str
    text: str
    tokens: int
    window: int
    perplexity: float
    variants: list[Divergence]


def measure_precision(
    model: str,
    *,
    tokens: int = 20_000,
    window: int = 2000,
    variants: tuple[Variant, ...] = VARIANTS,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PrecisionReport:
    """Run real source files through every variant.

    Args:
        model: its name or path.
        tokens: how many to compare, about.
        window: maximum tokens of each file.
        variants: what to measure; those that differ in name alone are measured once.
        threads: of the kernels; None takes all.
        progress: receives what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    progress(f"loading {model}")
    checkpoint = open_checkpoint(resolve(model))
    variants = distinct(checkpoint, variants)
    texts, source = _windows(checkpoint, tokens, window)
    runners = {
        each: CpuRunner.load(
            checkpoint, slots=window, threads=threads, weights=each.weights, kv_cache_dtype=each.kv
        )
        for each in (REFERENCE, *variants)
    }
    losses: list[float] = []
    divergences: dict[Variant, list[_Rows]] = {each: [] for each in variants}
    for number, ids in enumerate(texts):
        progress(f"text {number + 1} of {len(texts)}")
        for batch in _chunks(ids):
            expected = _log_likelihoods(runners[REFERENCE], batch)
            following = ids[batch.positions[-1] - batch.rows + 2 :]
            losses += _loss(expected, following)
            for each in variants:
                rows = _compare(expected, _log_likelihoods(runners[each], batch), following)
                divergences[each].append(rows)
    for runner in runners.values():
        runner.close()
    return PrecisionReport(
        model=model,
        machine=describe_machine(),
        stored=block_format(checkpoint, "auto").name,
        text=source,
        tokens=sum(len(ids) for ids in texts),
        window=window,
        perplexity=math.exp(fmean(losses)),
        variants=[_summary(checkpoint, each, rows) for each, rows in divergences.items()],
    )


def distinct(checkpoint: Checkpoint, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Return the variants without those whose KV cache dtype an earlier one means by "auto"."""
    found: dict[tuple[WeightsOption, KVCacheDtype], Variant] = {}
    for each in variants:
        kv = choose_kv_cache_dtype(checkpoint, each.weights, each.kv)
        found.setdefault((each.weights, kv), each)
    return tuple(found.values())


class _Rows(msgspec.Struct, frozen=True):
    """Divergence, agreement of the most likely token, and loss of the next token, per row."""

    divergence: list[float]
    agrees: list[bool]
    loss: list[float]


def _windows(checkpoint: Checkpoint, tokens: int, window: int) -> tuple[list[IdArray], str]:
    """Return the first tokens of as many files as needed, and where the files come from."""
    documents = unseen_documents(60)
    found: list[IdArray] = []
    for text in documents.texts:
        if sum(map(len, found)) >= tokens:
            break
        ids = checkpoint.tokenizer.encode(text)[:window]
        found.append(np.array(ids, np.int32))
    return found, documents.source


def _chunks(ids: IdArray) -> Iterator[ForwardBatch]:
    """Yield the steps over one text with the logits of every row; its KV takes the first slots."""
    for start in range(0, len(ids), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(ids)), dtype=np.int32)
        end = rows[-1] + 1
        yield ForwardBatch(
            token_ids=ids[rows],
            positions=rows,
            write_slots=rows,
            query_indptr=np.array([0, len(rows)], np.int32),
            kv_indptr=np.array([0, end], np.int32),
            kv_slots=np.arange(end, dtype=np.int32),
            logit_rows=np.arange(len(rows), dtype=np.int32),
        )


def _log_likelihoods(runner: CpuRunner, batch: ForwardBatch) -> Float32Array:
    """Return log-probabilities, float32 [rows, vocab]."""
    return log_softmax(runner.forward(batch))


def _loss(log_likelihoods: Float32Array, following: IdArray) -> list[float]:
    """Return the next tokens' negative log-likelihoods; the text's last token has none."""
    targets = following[: len(log_likelihoods)]
    losses: list[float] = (-log_likelihoods[np.arange(len(targets)), targets]).tolist()
    return losses


def _compare(expected: Float32Array, got: Float32Array, following: IdArray) -> _Rows:
    return _Rows(
        (np.exp(expected) * (expected - got)).sum(axis=-1).tolist(),
        (expected.argmax(axis=-1) == got.argmax(axis=-1)).tolist(),
        _loss(got, following),
    )


def _summary(checkpoint: Checkpoint, variant: Variant, rows: list[_Rows]) -> Divergence:
    divergence = np.array([value for each in rows for value in each.divergence])
    return Divergence(
        variant=variant,
        weights=block_format(checkpoint, variant.weights).name,
        kv=choose_kv_cache_dtype(checkpoint, variant.weights, variant.kv).value,
        mean=float(divergence.mean()),
        median=float(np.median(divergence)),
        p99=float(np.quantile(divergence, 0.99)),
        agreement=fmean(value for each in rows for value in each.agrees),
        perplexity=math.exp(fmean(value for each in rows for value in each.loss)),
    )


def precision_table(report: PrecisionReport) -> ResultTable:
    """A row per format of weights and KV."""
    exact = {
        "weights": "f32",
        "KV": "f32",
        "KL mean": "0",
        "KL median": "0",
        "KL p99": "0",
        "same top token": "100%",
        "perplexity": f"{report.perplexity:.3f}",
    }
    return ResultTable(
        title="What rounding costs",
        rows=[exact, *map(_cells, report.variants)],
        labels=2,
        caption=f"{report.model} without an adapter, layers stored as {report.stored.lower()}, "
        f"{report.tokens:,} tokens of files of {report.text}, which no adapter was trained on, "
        f"at most {report.window:,} of each; KL in nats per token, "
        "from the float32 kernels with the same weights; activations that meet q4 or q8 are "
        "rounded to int8.",
    )


def _cells(result: Divergence) -> dict[str, str]:
    option = result.variant.weights
    note = f" (--weights {option})" if option in ("q4", "q8") else ""
    if option == result.variant.kv == "auto":
        note = " (served)"
    return {
        "weights": result.weights.lower() + note,
        "KV": result.kv,
        "KL mean": f"{result.mean:.5f}",
        "KL median": f"{result.median:.5f}",
        "KL p99": f"{result.p99:.5f}",
        "same top token": f"{result.agreement:.1%}",
        "perplexity": f"{result.perplexity:.3f}",
    }


def precision(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=100, help="How many to compare, about.")] = 20_000,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure what rounding weights, activations and KV costs: divergence from float32 on code."""
    with show_steps("loading") as progress:
        report = measure_precision(
            model or DEFAULT_MODEL, tokens=tokens, threads=threads, progress=progress
        )
    publish(report, precision_table(report), section="precision", json=json, docs=docs)
