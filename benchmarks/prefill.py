"""A run: dense attention, methods and baselines on the same prompts.

Processor time is measured, not time on the wall, so a run beside other work means something. A
prefill's attention is what it takes beyond one whose rows attend to their own block of 64 keys
only; choosing keys is part of it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.arrays import BoolArray, Float32Array
from midfill.cli.options import ModelOption
from midfill.cli.progress import show_steps
from midfill.engine.request import EngineSamplingParams
from midfill.errors import OptionError
from midfill.methods.method import Method
from midfill.methods.registry import methods_of, parse_name, resolve_method
from midfill.methods.sparse_prefill.method import ChunkRule, PrefillMethod
from midfill.methods.sparse_prefill.minference import LOCAL, SINKS
from midfill.methods.sparse_prefill.patterns import cross_mask
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.runners.forward.attention import (
    QUERY_BLOCK,
    KeyPairs,
    LayerProbe,
    SpanLists,
    query_blocks,
)
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.methods.probes import Haystacks, Probe, needle_probes
from midfill_lab.bench.methods.results import split_specifications
from midfill_lab.bench.methods.session import MethodSession
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

DENSE = "none"
"""Specification of dense attention, beside which everything is measured."""


class PrefillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        tokens: of each prompt, or as many as the context has room for.
        depths: where a needle is, one prompt each.
        scored: tokens at a prompt's end whose distributions are compared.
        repeats: runs of everything that is timed; figures are medians.
        threads: that the model runs on.
        seed: of all random choices.
    """

    tokens: int = 8000
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    scored: int = 64
    repeats: int = 3
    threads: int = 1
    seed: int = 0


QUICK = PrefillOptions(tokens=4000, depths=(0.2, 0.8), repeats=1)


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """One variant.

    Attributes:
        name: as it is shown.
        seconds: processor time of a prefill, in each repeat.
        rest_seconds: of one whose rows attend to their own block only, moments before.
        dense_seconds: of a dense one, moments before.
        pairs: products of queries and keys in listed chunks, per layer and query head.
        causal: products of dense attention in these chunks, per layer and head.
        logprob: mean log-probability of the needles' tokens, in nats.
        greedy: share of the needles that a greedy answer would be.
        divergence: mean Kullback-Leibler divergence from dense attention, in nats per token.
    """

    name: str
    seconds: list[float] = []
    rest_seconds: list[float] = []
    dense_seconds: list[float] = []
    pairs: list[list[int]] = []
    causal: int = 0
    logprob: float = 0.0
    greedy: float = 0.0
    divergence: float = 0.0


class PrefillReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        load: processes that ran or waited for a core in the minute before the run, on average.
        model, backend, text: what ran, and where its text comes from.
        tokens: of the prompts.
        results: dense attention first.
    """

    machine: Machine
    load: float
    options: PrefillOptions
    model: str
    backend: str
    text: str
    tokens: int
    results: list[PrefillResult]


_SINK_SHARE = 0.1
_HALVINGS = 16


@dataclass(frozen=True)
class OwnBlock:
    """Lists each block's own keys only: what is left of a prefill without attention.

    Attributes:
        rule: the chunks.
    """

    rule: ChunkRule

    @property
    def variant(self) -> str:
        """See ``PrefillMethod``."""
        return repr(self)

    @property
    def chunk_tokens(self) -> int:
        """See ``PrefillMethod``."""
        return self.rule.tokens

    def is_dense(self, first: int, rows: int) -> bool:
        """Return whether the chunk has fewer rows than a block."""
        return rows < QUERY_BLOCK

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        lists = SpanLists.of_everything(probe.query_heads, probe.first, probe.rows)
        lists.spans[:, 0] = np.maximum(lists.spans[:, 1] - QUERY_BLOCK, 0)
        return lists


@dataclass(frozen=True)
class AShape(OwnBlock):
    """The first keys and a window, in every head.

    Attributes:
        share: of the keys at hand; a tenth of it are first keys.
    """

    share: float

    def is_dense(self, first: int, rows: int) -> bool:
        """See ``PrefillMethod``."""
        return self.rule.is_dense(first, rows)

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        mask = self.mask(probe.first, probe.rows)
        return SpanLists.from_mask(np.repeat(mask, probe.query_heads, axis=1))

    def mask(self, first: int, rows: int) -> BoolArray:
        """Return what one head attends to: [blocks, 1, keys]."""
        keys = first + rows
        columns, diagonals = np.zeros((2, 1, keys), bool)
        columns[0, : round(_SINK_SHARE * self.share * keys)] = True
        diagonals[0, : max(1, round((1 - _SINK_SHARE) * self.share * keys))] = True
        return cross_mask(columns, diagonals, first, rows)


@dataclass(frozen=True)
class RandomCross(AShape):
    """The first keys, the nearest ones, and columns and diagonals at random, in every head.

    Half of the lists' lengths comes from columns, half from diagonals.
    """

    def plan(self, probe: LayerProbe) -> SpanLists:
        """See ``PrefillMethod``."""
        masks = [
            self.mask(probe.first, probe.rows, (probe.layer, head))
            for head in range(probe.query_heads)
        ]
        return SpanLists.from_mask(np.concatenate(masks, axis=1))

    def mask(self, first: int, rows: int, seed: tuple[int, ...] = (0, 0)) -> BoolArray:
        """Return what one head attends to: [blocks, 1, keys]."""
        keys = first + rows
        rng = np.random.default_rng((*seed, first))
        columns, diagonals = np.zeros((2, 1, keys), bool)
        columns[0, :SINKS] = True
        diagonals[0, :LOCAL] = True
        wanted = self.share * keys / 2
        columns[0, rng.choice(keys, min(keys, round(wanted)), replace=False)] = True
        diagonals[0, rng.choice(keys, min(keys, round(wanted / QUERY_BLOCK)), replace=False)] = True
        return cross_mask(columns, diagonals, first, rows)


@dataclass(frozen=True)
class RandomBlocks(RandomCross):
    """The first keys, each block's own, and blocks of keys at random, other ones for each block."""

    def mask(self, first: int, rows: int, seed: tuple[int, ...] = (0, 0)) -> BoolArray:
        """Return what one head attends to: [blocks, 1, keys]."""
        keys = first + rows
        rng = np.random.default_rng((*seed, first))
        listed = np.zeros((query_blocks(rows), 1, keys), bool)
        for number, own in enumerate(listed[:, 0]):
            start = first + number * QUERY_BLOCK
            before = start // QUERY_BLOCK
            chosen = rng.choice(before, min(before, round(self.share * before)), replace=False)
            for block in chosen * QUERY_BLOCK:
                own[block : block + QUERY_BLOCK] = True
            own[:SINKS] = True
            end = min(start + QUERY_BLOCK, keys)
            own[max(end - QUERY_BLOCK, 0) : end] = True
            own[end:] = False
        return listed


def of_equal_cost(
    make: Callable[[ChunkRule, float], AShape], rule: ChunkRule, tokens: int, pairs: float
) -> AShape:
    """Return a baseline that computes about as many products per head as a method does.

    Args:
        make: returns the baseline for a share of the keys.
        rule: its chunks.
        tokens: of the prompt.
        pairs: products per layer and head in the chunks that are listed.
    """
    low, high = 0.0, 2.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _pairs(make(rule, middle), tokens) < pairs:
            low = middle
        else:
            high = middle
    return make(rule, low)


def _pairs(method: AShape, tokens: int) -> int:
    """Return the products of one layer and head over a prompt."""
    size, total = method.rule.tokens, 0
    for first in range(0, tokens, size):
        rows = min(size, tokens - first)
        if not method.is_dense(first, rows):
            counts = np.minimum(QUERY_BLOCK, rows - np.arange(query_blocks(rows)) * QUERY_BLOCK)
            total += int((method.mask(first, rows).sum(axis=(1, 2)) * counts).sum())
    return total


_REST = "own block"
_BASELINES = (("A-shape", AShape), ("random", RandomCross), ("random blocks", RandomBlocks))
_ANSWER_ROOM = 64


def measure_prefill(
    model: str,
    methods: Sequence[str],
    options: PrefillOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> PrefillReport:
    """Measure methods of sparse prefill.

    Args:
        model: name or path.
        methods: their specifications.
        options: what is measured.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be loaded, or a method can't be used with it.
    """
    load = os.getloadavg()[0]
    progress(f"loading {model}")
    extra: dict[str, PrefillMethod] = {_REST: OwnBlock(ChunkRule(1024, 0))}
    session = _PrefillSession(model, options.threads, extra)
    try:
        haystacks = Haystacks(session.encode, options.seed)
        tokens = min(options.tokens, session.info.context - _ANSWER_ROOM)
        drawn = needle_probes(
            session.tokenizer, haystacks, tokens=tokens - _ANSWER_ROOM, depths=options.depths,
            repeats=1, seed=options.seed,
        )  # fmt: skip
        probes = [probe for probe in drawn if probe.task == "needle"]
        names = {DENSE: "dense", **{method: method for method in methods}}
        run = _Run(session, options, probes, progress)
        counts = {name: run.pairs(name) for name in names}
        for method in methods:
            for title, make in _BASELINES:
                name = f"{title} beside {method}"
                names[name] = name
                found = session.find_method(method)
                assert isinstance(found, PrefillMethod)
                extra[name] = _of_equal_cost(make, found, counts[method][0], len(probes[0].tokens))
                counts[name] = run.pairs(name)
        quality = run.quality(list(names))
        seconds = run.times([DENSE, *methods])
        results = [
            _result(name, title, seconds, counts[name], quality[name])
            for name, title in names.items()
        ]
        return PrefillReport(
            machine=describe_machine(), load=load, options=options, model=model,
            backend=session.info.backend, text=haystacks.source, tokens=len(probes[0].tokens),
            results=results,
        )  # fmt: skip
    finally:
        session.close()


def _result(
    name: str,
    title: str,
    seconds: Sequence[Mapping[str, float]],
    counts: tuple[list[list[int]], int],
    quality: tuple[float, float, float],
) -> PrefillResult:
    """Return what was measured of one method.

    Args:
        name: its specification.
        title: what it is called.
        seconds: of prefills with all methods, in each repeat.
        counts: its products by layer and head, and those of dense attention.
        quality: log-probability and greedy share of needles, and divergence from dense.
    """
    logprob, greedy, divergence = quality
    return PrefillResult(
        name=title,
        seconds=[taken[name] for taken in seconds if name in taken],
        rest_seconds=[taken[_REST] for taken in seconds],
        dense_seconds=[taken[DENSE] for taken in seconds],
        pairs=counts[0],
        causal=counts[1],
        logprob=logprob,
        greedy=greedy,
        divergence=divergence,
    )


def _of_equal_cost(
    make: Callable[[ChunkRule, float], AShape],
    method: PrefillMethod,
    pairs: Sequence[Sequence[int]],
    tokens: int,
) -> PrefillMethod:
    """Return a baseline that takes as many products of queries and keys as a method.

    Args:
        make: the baseline's kind.
        method: the method.
        pairs: its products, by layer and head.
        tokens: of a prompt.
    """
    rule = ChunkRule(method.chunk_tokens, _dense_until(method))
    heads = sum(map(len, pairs)) or 1
    return of_equal_cost(make, rule, tokens, sum(map(sum, pairs)) / heads)


def _dense_until(method: PrefillMethod) -> int:
    """Return up to which number of keys a method's chunks are dense."""
    size = method.chunk_tokens
    first = 0
    while method.is_dense(first, size):
        first += size
    return first


class _PrefillSession(MethodSession):
    """A session that tells what methods of sparse prefill compute, and in what time."""

    @property
    def key_pairs(self) -> KeyPairs:
        """What methods of sparse prefill have computed."""
        return self._engine.key_pairs

    def find_method(self, specification: str) -> Method | None:
        """Return a method as requests name it."""
        return self._engine.find_method(specification)

    def prefill_seconds(self, tokens: Sequence[int], method: str) -> float:
        """Return the processor time up to a prompt's first token, nothing of it cached.

        Args:
            tokens: the prompt.
            method: its specification.
        """
        sampling = EngineSamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        tenant = f"cold {next(self._numbers)}"
        self._engine.add(self._request(tokens, method, sampling, tenant=tenant))
        started = time.process_time()
        self._run()
        return time.process_time() - started


class _Run:
    """Measurements of one loaded model."""

    def __init__(
        self,
        session: _PrefillSession,
        options: PrefillOptions,
        probes: Sequence[Probe],
        progress: Callable[[str], None],
    ) -> None:
        self._session = session
        self._options = options
        self._probes = probes
        self._progress = progress

    def pairs(self, name: str) -> tuple[list[list[int]], int]:
        """Return the products of a prefill of the first prompt, by layer and head, and dense ones.

        Layers that no method is asked about are left out.
        """
        self._progress(f"counting: {name}")
        counts = self._session.key_pairs
        before, causal = counts.computed.copy(), counts.causal.copy()
        self._session.hold(self._probes[0].tokens, name, 2, cold=True)
        listed = counts.causal > causal
        if not listed.any():
            return [], 0
        return (counts.computed - before)[listed].tolist(), int((counts.causal - causal).max())

    def quality(self, names: Sequence[str]) -> dict[str, tuple[float, float, float]]:
        """Return log-probability and greedy share of needles, and divergence from dense."""
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for number, probe in enumerate(self._probes, 1):
            dense = self._distributions(probe, DENSE)
            for name in names:
                self._progress(f"prompt {number} of {len(self._probes)}: {name}")
                own = dense if name == DENSE else self._distributions(probe, name)
                divergence = (np.exp(dense) * (dense - own)).sum(axis=-1).mean()
                start, end = probe.answers[0]
                answer = np.array(probe.tokens[start:end])
                rows = own[start - end :]
                logprob = rows[np.arange(len(answer)), answer].mean()
                greedy = (rows.argmax(axis=-1) == answer).all()
                found[name].append((float(logprob), float(greedy), float(divergence)))
        return {name: _means(figures) for name, figures in found.items()}

    def times(self, names: Sequence[str]) -> list[dict[str, float]]:
        """Return the processor seconds of prefills, one after the other, in each repeat."""
        taken = []
        for repeat in range(self._options.repeats):
            seconds = {}
            for name in (_REST, *names):
                self._progress(f"repeat {repeat + 1} of {self._options.repeats}: {name}")
                seconds[name] = self._session.prefill_seconds(self._probes[0].tokens, name)
            taken.append(seconds)
        return taken

    def _distributions(self, probe: Probe, name: str) -> Float32Array:
        first = probe.answers[0][0] - self._options.scored
        return self._session.log_likelihoods(probe.tokens, name, probe.compress_after, first)


def _means(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    logprob, greedy, divergence = (fmean(column) for column in zip(*rows, strict=True))
    return logprob, greedy, divergence


_NOTHING = "-"


def prefill_table(report: PrefillReport) -> ResultTable:
    """Return the table: dense attention, methods, and baselines of equal cost."""
    options, prompts = report.options, len(report.options.depths)
    return ResultTable(
        title=f"Sparse prefill: {report.model}",
        rows=[_cells(result) for result in report.results],
        caption=f"{report.model}, {report.backend}; prompts of {report.tokens:,} tokens of"
        f" {report.text}, each with a needle. Products: of queries and keys, counted, beside those"
        " of dense attention in all layers that attend to everything; of heads: the least and the"
        " most of any head. Attention: processor time beyond that of a prefill whose rows attend"
        " to their own block of 64 keys, with what it takes to choose keys; in brackets, how many"
        f" times as fast as dense, median of {options.repeats} runs in turn. Needle: mean"
        f" log-probability of its tokens in {prompts} prompts, and how many a greedy answer"
        f" finds; KL: of the {options.scored} tokens before the answer and of the answer, in nats"
        " per token from dense attention. Baselines compute as many products as the method beside"
        " them: the first keys and a window; columns and diagonals at random; blocks at random."
        f" {report.machine}; load {report.load:.1f} before the run.",
    )


def _cells(result: PrefillResult) -> dict[str, str]:
    by_head = [pairs for layer in result.pairs for pairs in layer]
    shares = [pairs / result.causal for pairs in by_head] if result.causal else []
    return {
        "method": result.name,
        "products": f"{sum(shares) / len(shares):.1%}" if shares else "100%",
        "of heads": f"{min(shares):.0%} to {max(shares):.0%}" if shares else _NOTHING,
        "attention s": _attention(result),
        "prefill s": _prefill(result),
        "needle": f"{result.logprob:.3f}, {result.greedy:.0%}",
        "KL": f"{result.divergence:.4f}",
    }


def _attention(result: PrefillResult) -> str:
    if not result.seconds:
        return _NOTHING
    own = [a - rest for a, rest in zip(result.seconds, result.rest_seconds, strict=True)]
    dense = [a - rest for a, rest in zip(result.dense_seconds, result.rest_seconds, strict=True)]
    times = median(d / o for d, o in zip(dense, own, strict=True))
    return f"{median(own):.1f} ({times:.2f}x)"


def _prefill(result: PrefillResult) -> str:
    if not result.seconds:
        return _NOTHING
    pairs = zip(result.dense_seconds, result.seconds, strict=True)
    times = median(dense / own for dense, own in pairs)
    return f"{median(result.seconds):.1f} ({times:.2f}x)"


def prefill(
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...],...",
            help="Methods of sparse prefill, separated by commas; all there are if not set.",
        ),
    ] = None,
    model: ModelOption = None,
    tokens: Annotated[
        int | None, typer.Option(min=2000, help="Tokens per prompt; 8000, with --quick 4000.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Runs that are timed; 3, with --quick 1.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter prompts, timed once.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads that the model runs on.")] = 1,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods of sparse prefill beside dense attention, on the same prompts.

    Costs: products of queries and keys, counted; processor time of attention and of the whole
    prefill. Quality: needles in real source text, and the distributions of a prompt's last tokens.
    Beside each method, lists of the same length that know nothing.
    """
    chosen = {"tokens": tokens, "repeats": repeats, "threads": threads}
    options = msgspec.structs.replace(
        QUICK if quick else PrefillOptions(),
        **{name: value for name, value in chosen.items() if value is not None},
    )
    known = methods_of("prefill")
    named = known if methods is None else split_specifications(methods)
    for text in named:
        resolve_method(text)
        if parse_name(text) not in known:
            raise OptionError(
                f"--methods takes methods of sparse prefill ({', '.join(known)}),"
                f" not {parse_name(text)}"
            )
    with show_steps("loading") as progress:
        report = measure_prefill(model or DEFAULT_MODEL, named, options, progress)
    publish(report, prefill_table(report), section="prefill", json=json, docs=docs)
