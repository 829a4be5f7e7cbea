"""Codecs of stored KV measured: bytes and time per token, and what they change in answers."""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.arrays import Float32Array, Int32Array, RunnerArray
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.kv_transfer.warm_cache import CHUNK_TOKENS
from midfill.kv.ragged import cells_of_slots
from midfill.kv.tiers.warm_tier import ChunkCodec
from midfill.methods.needles import needle_text
from midfill.methods.store.cachegen import (
    CacheGen,
    CacheGenCodec,
    KvShape,
    cumulative_tables,
)
from midfill.methods.store.cachegen_profile import measure_counts
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.runners.forward.runner import Runner
from midfill.runners.loading import load_runner
from midfill.specifications import make_options
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import unseen_documents
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

DEFAULT_LEVELS = (
    "shallow=256,deep=256 shallow=128,deep=128 shallow=128,deep=64 shallow=64,deep=64"
    " shallow=64,deep=32 shallow=32,deep=32 shallow=32,deep=16 shallow=20,deep=20"
    " shallow=16,deep=16 shallow=16,deep=8"
)
_ROWS = 128
_NEEDLE_WORDS, _NEEDLE_SEED = 4, 23


class CodecOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one codec costs and changes.

    Attributes:
        codec: its options.
        token_bytes: of a token's code, scales and lengths included.
        fixed_bytes: the same with every symbol in as many bits as its layer needs.
        divergence: mean KL divergence of the next token's distribution from that over exact KV, in
            nats; ``divergence_p99``: its 99th percentile.
        agreement: share of tokens with the same most likely next one.
        perplexity: of the text after the coded one.
        needles: share of the needles that are told, word by word.
        encode_seconds, decode_seconds: per 1,000 tokens, on one thread.
    """

    codec: str
    token_bytes: float
    fixed_bytes: float
    divergence: float
    divergence_p99: float
    agreement: float
    perplexity: float
    needles: float
    encode_seconds: float
    decode_seconds: float


class CodecReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured; the first figures are those of exact KV."""

    model: str
    machine: Machine
    load: float
    source: str
    texts: int
    context: int
    needle_texts: int
    raw_bytes: int
    layout: str
    perplexity: float
    needles: float
    prefill_seconds: float
    outcomes: list[CodecOutcome]


@dataclasses.dataclass(frozen=True)
class _Text:
    """Tokens whose KV is coded, and the tokens after them."""

    context: Int32Array
    rest: Int32Array
    is_needle: bool


@dataclasses.dataclass
class _Scores:
    """What the rows after coded texts gave."""

    divergence: list[float] = dataclasses.field(default_factory=list)
    agrees: list[bool] = dataclasses.field(default_factory=list)
    loss: list[float] = dataclasses.field(default_factory=list)
    needles: list[bool] = dataclasses.field(default_factory=list)
    code_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


def measure_codecs(
    model: str,
    *,
    levels: tuple[str, ...] = tuple(DEFAULT_LEVELS.split()),
    texts: int = 12,
    context: int = 1024,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CodecReport:
    """Code the KV of real source text, and compare what the model says after it.

    Args:
        model: name or path.
        levels: options of CacheGen.
        texts: how many files, and as many texts with a needle.
        context: tokens whose KV is coded.
        threads: CPU threads; None takes all.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be found or loaded, or an option doesn't fit.
    """
    methods = {level: make_options(CacheGen, "cachegen", level, param="codec") for level in levels}
    progress(f"loading {model}")
    options = ModelOptions(threads=threads)
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), options.weights)
    runner = load_runner(checkpoint, options)
    bench = _Bench(runner, checkpoint.tokenizer)
    context = min(context, runner.config.context - _ROWS, runner.slots - _ROWS)
    codecs = {}
    for level, method in methods.items():
        progress(f"profile of {level}")
        codecs[level] = bench.codec(method)
    cases, source = _cases(checkpoint.tokenizer, texts, context)
    exact, scores = _Scores(), {level: _Scores() for level in levels}
    for number, case in enumerate(cases, 1):
        progress(f"text {number} of {len(cases)}")
        bench.score(case, codecs, exact, scores)
    coded = sum(len(case.context) for case in cases)
    return CodecReport(
        model=model,
        machine=describe_machine(),
        load=os.getloadavg()[0],
        source=source,
        texts=texts,
        context=context,
        needle_texts=sum(case.is_needle for case in cases),
        raw_bytes=bench.token_bytes,
        layout=runner.cells.layout.dtype,
        perplexity=math.exp(fmean(exact.loss)),
        needles=fmean(exact.needles),
        prefill_seconds=1000 * bench.prefill_seconds / coded,
        outcomes=[
            _outcome(level, methods[level], bench.shape, coded, scores[level]) for level in levels
        ],
    )


def _cases(tokenizer: Tokenizer, texts: int, context: int) -> tuple[list[_Text], str]:
    """Return files that no adapter was trained on, texts with needles, and the files' source."""
    documents = unseen_documents(4 * texts)
    cases: list[_Text] = []
    for text in documents.texts:
        ids = np.array(tokenizer.encode(text)[: context + _ROWS], np.int32)
        if len(ids) == context + _ROWS and len(cases) < texts:
            cases.append(_Text(ids[:context], ids[context:], is_needle=False))
    for number in range(texts):
        # Of each three texts, the first is the longest.
        needle = needle_text(tokenizer, context, _NEEDLE_WORDS, 3 * number, _NEEDLE_SEED)
        ids = np.concatenate((needle.token_ids, needle.answer))
        asked = len(needle.token_ids) - 8  # the question is computed, not loaded
        cases.append(_Text(ids[:asked], ids[asked:], is_needle=True))
    return cases, documents.source


class _Bench:
    """Runs texts in the first slots of a runner."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        config = runner.config
        self._runner = runner
        self._tokenizer = tokenizer
        self._heads = config.layers * config.kv_heads
        layout = runner.cells.layout
        self.shape = KvShape(layout.dtype, config.layers, config.kv_heads, config.head_dim)
        self.token_bytes = self._heads * sum(layout.widths)
        self.prefill_seconds = 0.0

    def codec(self, method: CacheGen) -> CacheGenCodec:
        """Return a codec with a profile of its own, computed from other texts."""
        counts = measure_counts(method, self.shape, self._runner, self._tokenizer)
        tables = cumulative_tables(counts, method.layer_bins(self.shape.layers))
        return CacheGenCodec(method, self.shape, tables)

    def score(
        self,
        case: _Text,
        codecs: dict[str, CacheGenCodec],
        exact: _Scores,
        scores: dict[str, _Scores],
    ) -> None:
        """Compare what follows a text over its exact and its coded KV."""
        started = time.perf_counter()
        for start in range(0, len(case.context), _ROWS):
            self._forward(case.context[: start + _ROWS], start, outputs=False)
        self.prefill_seconds += time.perf_counter() - started
        count = len(case.context)
        cells = cells_of_slots(np.arange(count, dtype=np.int32), self._heads, self._runner.slots)
        stored = self._runner.cells.dump(cells.reshape(-1))
        expected = self._log_likelihoods(case)
        _add(exact, case, expected, expected)
        for level, codec in codecs.items():
            totals = scores[level]
            arrays = [array.reshape(self._heads, count, -1) for array in stored]
            for start in range(0, count, CHUNK_TOKENS):
                part = slice(start, min(start + CHUNK_TOKENS, count))
                data = b"".join(array[:, part].tobytes() for array in arrays)
                self._restore(_coded(codec, data, part, totals), cells[:, part])
            _add(totals, case, expected, self._log_likelihoods(case))

    def _restore(self, data: bytes, cells: Int32Array) -> None:
        halves = np.frombuffer(data, np.uint8).reshape(2, cells.size, -1)
        self._runner.cells.restore(cells.reshape(-1), (halves[0], halves[1]))

    def _log_likelihoods(self, case: _Text) -> Float32Array:
        """Return log-probabilities after each token of the rest, float32 [rows, vocab]."""
        tokens = np.concatenate((case.context, case.rest))
        logits = self._forward(tokens, len(case.context), outputs=True)
        return log_softmax(self._runner.logits_ops.to_numpy(logits))

    def _forward(self, tokens: Int32Array, start: int, *, outputs: bool) -> RunnerArray:
        """Run tokens[start:]; those before are in the first slots."""
        seen = np.arange(len(tokens), dtype=np.int32)
        rows = len(tokens) - start
        return self._runner.forward(
            ForwardBatch(
                token_ids=tokens[start:],
                positions=seen[start:],
                write_slots=seen[start:],
                query_indptr=np.array([0, rows], np.int32),
                kv_indptr=np.array([0, len(tokens)], np.int32),
                kv_slots=seen,
                logit_rows=np.arange(rows if outputs else 1, dtype=np.int32),
            )
        )


def _coded(codec: ChunkCodec, data: bytes, part: slice, totals: _Scores) -> bytes:
    """Return KV as it comes back from a codec; count bytes and time."""
    tokens = part.stop - part.start
    started = time.perf_counter()
    code = codec.encode(data, tokens)
    encoded = time.perf_counter()
    decoded = codec.decode(code, tokens)
    totals.encode_seconds += encoded - started
    totals.decode_seconds += time.perf_counter() - encoded
    totals.code_bytes += len(code)
    return decoded


def _add(totals: _Scores, case: _Text, expected: Float32Array, got: Float32Array) -> None:
    """Add what the rows after a text gave."""
    targets = case.rest[1:]
    if case.is_needle:
        told = got.argmax(axis=-1)[7:-1] == targets[7:]
        totals.needles.append(bool(told.all()))
        return
    totals.divergence += (np.exp(expected) * (expected - got)).sum(axis=-1).tolist()
    totals.agrees += (expected.argmax(axis=-1) == got.argmax(axis=-1)).tolist()
    totals.loss += (-got[np.arange(len(targets)), targets]).tolist()


def _outcome(
    level: str, method: CacheGen, shape: KvShape, tokens: int, totals: _Scores
) -> CodecOutcome:
    bins = method.layer_bins(shape.layers)
    bits = np.ceil(np.log2(2 * (bins // 2) - 1)).sum() * shape.channels
    return CodecOutcome(
        codec=level,
        token_bytes=totals.code_bytes / tokens,
        fixed_bytes=float(bits) / 8 + 2 * bins.size,
        divergence=fmean(totals.divergence),
        divergence_p99=float(np.quantile(totals.divergence, 0.99)),
        agreement=fmean(totals.agrees),
        perplexity=math.exp(fmean(totals.loss)),
        needles=fmean(totals.needles),
        encode_seconds=1000 * totals.encode_seconds / tokens,
        decode_seconds=1000 * totals.decode_seconds / tokens,
    )


def codec_table(report: CodecReport) -> ResultTable:
    """Return the table of a report."""
    exact = {
        "cachegen": f"exact ({report.layout})",
        "bytes/token": f"{report.raw_bytes:,}",
        "smaller": "1.0",
        "fixed width": "",
        "bits/number": f"{_bits(report, report.raw_bytes):.2f}",
        "KL mean": "0",
        "KL p99": "0",
        "same top token": "100%",
        "perplexity": f"{report.perplexity:.3f}",
        "needles": f"{report.needles:.0%}",
        "encode ms": "",
        "decode ms": "",
    }
    return ResultTable(
        rows=[exact, *(_cells(report, outcome) for outcome in report.outcomes)],
        caption=(
            f"{report.model}: KV of {report.context:,} tokens is coded in chunks of {CHUNK_TOKENS},"
            f" and the next {_ROWS} tokens of {report.texts} files of {report.source} are computed"
            " over it. Fixed width: bytes per token without entropy coding. Needles: of"
            f" {report.needle_texts} texts of at most as many tokens. Times per 1,000 tokens on one"
            f" thread; computing them takes {report.prefill_seconds * 1e3:,.0f} ms."
            f" {report.machine}; load {report.load:.1f}."
        ),
    )


def _bits(report: CodecReport, token_bytes: float) -> float:
    numbers = report.raw_bytes / (4 if report.layout == "f32" else 2)
    return 8 * token_bytes / numbers


def _cells(report: CodecReport, outcome: CodecOutcome) -> dict[str, str]:
    return {
        "cachegen": outcome.codec,
        "bytes/token": f"{outcome.token_bytes:,.0f}",
        "smaller": f"{report.raw_bytes / outcome.token_bytes:.1f}",
        "fixed width": f"{outcome.fixed_bytes:,.0f}",
        "bits/number": f"{_bits(report, outcome.token_bytes):.2f}",
        "KL mean": f"{outcome.divergence:.4f}",
        "KL p99": f"{outcome.divergence_p99:.3f}",
        "same top token": f"{outcome.agreement:.1%}",
        "perplexity": f"{outcome.perplexity:.3f}",
        "needles": f"{outcome.needles:.0%}",
        "encode ms": f"{outcome.encode_seconds * 1e3:,.0f}",
        "decode ms": f"{outcome.decode_seconds * 1e3:,.0f}",
    }


def codecs(
    model: ModelArgument = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Options of CacheGen, separated by blanks, as in 'deep=16 deep=8'."),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Files, and texts with a needle.")] = 12,
    context: Annotated[int, typer.Option(min=64, help="Tokens whose KV is coded.")] = 1024,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure codecs of stored KV: bytes per token beside what they change in answers."""
    with show_steps("loading") as progress:
        report = measure_codecs(
            model or DEFAULT_MODEL,
            levels=tuple((levels or DEFAULT_LEVELS).split()),
            texts=texts,
            context=context,
            threads=threads,
            progress=progress,
        )
    publish(report, codec_table(report), section="codecs", json=json, docs=docs)
