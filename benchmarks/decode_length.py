"""Decode step time against length: rows that read everything beside rows that choose pages.

What a step takes doesn't depend on the numbers in the KV cache, so keys and values are drawn at
random instead of being computed from a text, and the model may be told that it has a longer
context. Methods are at work as in the engine: they arrange each step, and are told what it made.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import typer

from benchmarks.plots import plot_decode_length
from benchmarks.report import publish
from midfill.arrays import Int32Array
from midfill.cli.options import ModelOption
from midfill.cli.progress import show_steps
from midfill.engine.step.batching import BatchRows, pack
from midfill.errors import OptionError
from midfill.kv.pool import KVPool
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.methods.method import ModelSpecific
from midfill.methods.registry import methods_of, parse_name, resolve_method
from midfill.methods.sequence_method import RequestFacts, SequenceMethod, SequenceRows
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_decode.lserve import SplitPages
from midfill.methods.sparse_decode.method import SparseDecodeMethod
from midfill.methods.sparse_decode.sequence import PageReader, SparseDecodeKind
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_model
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.methods.results import split_specifications
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption, PlotOption
from midfill_lab.reporting import ResultTable

DENSE = "all keys"
_CELLS_AT_ONCE = 1 << 16


class LengthResult(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one method at one length.

    Attributes:
        method: its specification.
        tokens: of the text.
        step_seconds: of a token's step, medians of groups of steps one after the other.
        first_seconds: of the first step, which summarises the text's pages.
        keys: that a row reads per layer and query head, on average.
        cells: that the text's KV takes, of those of full KV.
        summary_bytes: of the summaries of its pages.
    """

    method: str
    tokens: int
    step_seconds: list[float]
    first_seconds: float
    keys: float
    cells: float
    summary_bytes: int

    @property
    def seconds(self) -> float:
        """The median step."""
        return median(self.step_seconds)


class LengthReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    machine: Machine
    load: float
    model: str
    threads: int
    results: list[LengthResult]


@dataclass
class LongerContext:
    """A checkpoint whose model is said to have room for more tokens."""

    checkpoint: Checkpoint
    config: ModelConfig

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)


@dataclass
class DrawnText:
    """A sequence of one text whose KV was drawn; what a method looks at of it.

    Attributes:
        kv: itself: it holds its slots.
        computed: how many of its tokens have KV.
        prefix: nothing that methods know of.
    """

    slots: Int32Array
    computed: int
    prefix: None = None

    @property
    def kv(self) -> "DrawnText":
        return self


class Decoding:
    """Decodes after a drawn text, token by token.

    Args:
        runner: has the KV of as many tokens in its first slots.
        method: that reads it; None reads everything.
        length: tokens of the text.
    """

    def __init__(self, runner: CpuRunner, method: SparseDecodeMethod | None, length: int) -> None:
        self._runner = runner
        self._text = DrawnText(np.arange(runner.slots, dtype=np.int32), length)
        self._method = SequenceMethod()
        self._cells: RaggedIndex | None = None
        self.kind = SparseDecodeKind(runner.config, KVPool(runner.slots))
        if method is not None:
            facts = RequestFacts(length, length)
            found = self.kind.attach("m", method, facts, cast(Any, self._text))
            assert isinstance(found, PageReader)
            self._method = found
        if isinstance(method, SplitPages):
            self._cells = _kept_cells(runner, method, length)
        self._length = length

    @property
    def cells(self) -> float:
        """How many cells the text's KV takes, of those of full KV."""
        if self._cells is None:
            return 1.0
        heads = self._runner.config.layers * self._runner.config.kv_heads
        return len(self._cells.cells) / (heads * self._length)

    def step(self) -> float:
        """Run a token; return the seconds."""
        start = time.perf_counter()
        text, first = self._text, self._text.computed
        position = np.array([first], np.int32)
        before = 0 if self._cells is None else self._length
        plan = None if self._cells is None else AttentionPlan(self._cells)
        rows = SequenceRows(position, text.slots[before : first + 1], None, plan)
        rows = self._method.arrange(cast(Any, text), first, first + 1, rows)
        token = np.ones(1, np.int32)
        batch = pack(
            [BatchRows(token, position, position, rows.kv_slots, None, (0,), (), rows.plan)]
        )
        self._runner.forward(batch)
        text.computed += 1
        self._method.committed(cast(Any, text))
        return time.perf_counter() - start

    def rewind(self) -> None:
        """Forget the tokens after the text."""
        self._text.computed = self._length
        self._method.rolled_back(self._length)


def _kept_cells(runner: CpuRunner, method: SplitPages, length: int) -> RaggedIndex:
    """Return the cells that heads hold once those that stream have dropped theirs."""
    slots = np.arange(length, dtype=np.int32)
    rule = method.rule
    streamed = np.concatenate((slots[: rule.sinks], slots[rule.sinks :][-rule.recent :]))
    heads = len(method.retrieval)
    cells = cells_of_slots(slots, heads, runner.slots)
    kept = [
        row if whole or length <= len(streamed) else row[streamed]
        for row, whole in zip(cells, method.retrieval, strict=True)
    ]
    indptr = np.cumsum([0, *map(len, kept)]).astype(np.int32)
    return RaggedIndex(np.concatenate(kept), indptr)


def draw_kv(runner: CpuRunner, tokens: int) -> None:
    """Write random keys and values of so many tokens to the first slots."""
    config, rng = runner.config, np.random.default_rng(0)
    drawn = rng.normal(size=(_CELLS_AT_ONCE, config.head_dim)).astype(np.float32)
    for head in range(config.layers * config.kv_heads):
        for first in range(0, tokens, _CELLS_AT_ONCE):
            slots = np.arange(first, min(first + _CELLS_AT_ONCE, tokens), dtype=np.int32)
            numbers = drawn[: len(slots)]
            runner.cells.write(slots + np.int32(head * runner.slots), numbers, numbers[::-1].copy())


def measure_decode_length(
    model: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    *,
    threads: int,
    repeats: int,
    progress: Callable[[str], None],
) -> LengthReport:
    """Measure steps of every method and of dense attention, in turn, at each length.

    Args:
        model: name or path.
        methods: specifications.
        lengths: in tokens.
        threads: that the model runs on.
        repeats: groups of 8 steps.
        progress: called with what is being done.
    """
    load = os.getloadavg()[0]
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), "auto")
    served = ServedModel(checkpoint.config, digest=model_digest(checkpoint))
    ready: dict[str, SparseDecodeMethod | None] = {DENSE: None}
    for specification in methods:
        method = resolve_method(specification)
        if isinstance(method, ModelSpecific):
            method = method.for_model(served)
        ready[specification] = cast("SparseDecodeMethod", method)
    room = max(lengths) + 64
    config = replace(checkpoint.config, context=max(room, checkpoint.config.context))
    longer = cast(Checkpoint, LongerContext(checkpoint, config))
    runner = CpuRunner.load(longer, slots=room, threads=threads)
    try:
        progress("drawing keys and values")
        draw_kv(runner, max(lengths))
        results = []
        for length in lengths:
            progress(f"{length:,} tokens")
            results += _at_length(runner, ready, length, repeats)
    finally:
        runner.close()
    return LengthReport(
        machine=describe_machine(), load=load, model=model, threads=threads, results=results
    )


def _at_length(
    runner: CpuRunner, methods: dict[str, SparseDecodeMethod | None], length: int, repeats: int
) -> list[LengthResult]:
    decodings = {name: Decoding(runner, method, length) for name, method in methods.items()}
    first = {name: one.step() for name, one in decodings.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, one in decodings.items():
            one.rewind()
            one.step()  # whatever the one before has left in the caches
            steps = [one.step() for _ in range(8)]
            seconds[name].append(sum(steps) / len(steps))
    heads, found = runner.config.layers * runner.config.query_heads, []
    for name, one in decodings.items():
        reads, method = one.kind.reads, methods[name]
        keys = reads.pairs / reads.rows / heads if reads.rows else _all_keys(runner, length + 5)
        summaries = 0
        if method is not None:
            width = 2 * runner.config.head_dim * runner._kv_cache.keys.itemsize
            heads_kept = runner.config.layers * runner.config.kv_heads
            summaries = method.selection_rule.summaries(length + 1) * width * heads_kept
        found.append(
            LengthResult(
                method=name,
                tokens=length,
                step_seconds=seconds[name],
                first_seconds=first[name],
                keys=keys,
                cells=one.cells,
                summary_bytes=summaries,
            )
        )
    return found


def _all_keys(runner: CpuRunner, seen: int) -> float:
    """Return how many of ``seen`` keys a row reads without a method, on average over layers."""
    windows = map(runner.config.window_of, range(runner.config.layers))
    return fmean(seen if window is None else min(window, seen) for window in windows)


def length_table(report: LengthReport) -> ResultTable:
    """Return the table: a row per method, a column per length."""
    names = list(dict.fromkeys(result.method for result in report.results))
    lengths = list(dict.fromkeys(result.tokens for result in report.results))
    by_place = {(result.method, result.tokens): result for result in report.results}
    rows = []
    for name in names:
        cells = {"method": name}
        for length in lengths:
            cells[f"{length:,}"] = f"{by_place[name, length].seconds * 1e3:.1f}"
        last = by_place[name, lengths[-1]]
        cells["first step"] = f"{last.first_seconds * 1e3:.0f}"
        cells["keys read"] = f"{last.keys:,.0f}"
        cells["cells"] = f"{last.cells:.0%}"
        rows.append(cells)
    return ResultTable(
        title=f"Decode step time against length: {report.model}",
        rows=rows,
        caption="Milliseconds per token after a text of so many tokens whose keys and values were"
        " drawn at random, median of groups of 8 steps, methods in turn; the first step after"
        f" the longest text, which summarises its pages; keys that a row reads there, per layer"
        " and query head; and the share of the text's cells that is held."
        f" {report.threads} thread{'' if report.threads == 1 else 's'}. {report.machine}; load"
        f" {report.load:.1f} before the run.",
    )


def decode_length(
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...],...",
            help="Methods that choose keys while decoding, separated by commas.",
        ),
    ] = "lserve:budget=512,static=0,lserve:budget=512",
    lengths: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Lengths of the text.")
    ] = "500,2000,4000,8000,32000",
    model: ModelOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Groups of steps that are timed.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads that the model runs on.")] = 1,
    json: JsonOption = None,
    docs: DocsOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure decode step time against length, with all keys and with chosen ones."""
    named, known = split_specifications(methods), methods_of("decode")
    for text in named:
        resolve_method(text)
        if parse_name(text) not in known:
            raise OptionError(
                f"--methods takes methods of sparse decoding ({', '.join(known)}),"
                f" not {parse_name(text)}"
            )
    try:
        tokens = sorted({int(part) for part in lengths.split(",")})
    except ValueError:
        tokens = [0]
    if tokens[0] < 1:
        raise OptionError(f"--lengths takes numbers of tokens above 0, not {lengths!r}")
    with show_steps("loading") as progress:
        report = measure_decode_length(
            model or DEFAULT_MODEL, named, tokens, threads=threads, repeats=repeats,
            progress=progress,
        )  # fmt: skip
    publish(report, length_table(report), section="decode-length", json=json, docs=docs)
    if plot is not None:
        plot_decode_length(report, plot)
