"""Loads of agents, retrieved chunks and edited prompts, under methods of reuse and their nulls.

Every method answers all prompts of a load, one after the other, in an engine of its own that has
seen nothing before; the exact answers come from an engine without a method, which has the prefix
cache. The answers' tokens are given: first what is right, then what the exact engine goes on with.
All distributions are therefore of the same text, token by token.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import typer

from benchmarks.report import difference_cell, publish
from benchmarks.reuse_nulls import reuse_nulls
from benchmarks.reuse_prompts import AGENTS, CHUNKS, EDITS, LOADS, LoadMaker, LoadPrompt, LoadSizes
from midfill.arrays import Float32Array, RunnerArray
from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import GenerationError, MidfillError, OptionError
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import methods_of, parse_name, resolve_method
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.reuse.cachecraft import CacheCraft
from midfill.methods.reuse.kvshare import KVShare
from midfill.methods.reuse.sequence import ReuseKind
from midfill.methods.sequence_method import RequestFacts
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_record import raw_bos_of
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_model
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.system.machine import Machine, describe_machine
from midfill_lab.cli.bench.options import JsonOption, LoadedModelOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable, saver

FULL = "none"
METHODS: Mapping[str, str] = {
    AGENTS: "kvcomm kvcomm:distance=rms,gamma=0.98",
    CHUNKS: "cachecraft",
    EDITS: "kvshare:eps=0,refresh=0 kvshare",
}
"""What each load is measured with, unless something else is asked for.

KVShare's default leaves so little to repair that nulls would hardly differ."""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        methods: specifications, by load; the first is compared with its nulls.
        sizes: of the loads.
        steps: tokens of an answer, at most.
        seed: all chance follows from it.
    """

    methods: dict[str, list[str]]
    sizes: LoadSizes = LoadSizes()
    steps: int = 64
    seed: int = 0


class LoadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one prompt took under one method, and what came of it.

    Attributes:
        ttft_seconds: until the logits of the first token were there.
        row_layers: rows times layers, the prompt's and what was repaired while it was answered.
        reused_tokens: prompt tokens whose KV came from elsewhere.
        divergence: KL of the exact distributions from these, in nats per token of the answer.
        first_same: whether the most likely first token is that of the exact answer.
        right: whether each token that is right is the most likely one.
    """

    ttft_seconds: float
    row_layers: int
    reused_tokens: int
    divergence: float
    first_same: bool
    right: bool


class MethodAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """A load under one method.

    Attributes:
        answers: in the order of prompts.
        method_bytes: what the method remembers at the end, its index included, beside KV in slots.
        cached_tokens: how many slots the prefix cache has at the end.
    """

    answers: list[LoadAnswer]
    method_bytes: int
    cached_tokens: int


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """A load under every method.

    Attributes:
        load: its name.
        groups: of each prompt; those of one group are not independent.
        tokens: of each prompt.
        by_method: by specification or name of a null; ``FULL`` is exact.
    """

    load: str
    groups: list[str]
    tokens: list[int]
    by_method: dict[str, MethodAnswers]


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        slot_bytes: of one token's KV.
        busy: other work on the machine when it began (the system's load average).
        text: where the files come from.
    """

    model: str
    slot_bytes: int
    machine: Machine
    busy: float
    text: str
    options: LoadOptions
    results: list[LoadResult]


def measure_loads(
    model: str,
    options: LoadOptions,
    *,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    save: Callable[[LoadReport], None] = lambda _: None,
) -> LoadReport:
    """Measure methods of reuse and their nulls on loads.

    Args:
        model: name or path.
        options: what to measure.
        threads: that the model runs on; None is one per core.
        progress: called with what is being done.
        save: called with the report so far.

    Raises:
        MidfillError: the model can't be loaded, or a prompt is too long for it.
    """
    busy = os.getloadavg()[0]
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), "auto")
    begin = raw_bos_of(checkpoint)
    maker = LoadMaker(
        checkpoint.tokenizer, [] if begin is None else [begin], options.sizes, options.seed
    )
    loads = {load: maker.make(load) for load in options.methods}
    served = ServedModel(checkpoint.config, digest=model_digest(checkpoint))
    room = {
        load: sum(len(prompt.tokens) + options.steps for prompt in prompts)
        for load, prompts in loads.items()
    }
    # Twice: text that was blended is in a branch, and may be cached exactly later.
    runner = CpuRunner.load(checkpoint, slots=2 * max(room.values()), threads=threads)
    results: list[LoadResult] = []

    def report() -> LoadReport:
        return LoadReport(
            model=model,
            slot_bytes=runner.kv_bytes // runner.slots,
            machine=describe_machine(),
            busy=busy,
            text=maker.source,
            options=options,
            results=results,
        )

    try:
        replay = _Replay(runner, checkpoint.tokenizer.eos_token_ids, options.steps)
        for load, prompts in loads.items():
            methods = _with_nulls(options.methods[load], served)
            note = partial(_note, progress, load)
            found = replay.replay(prompts, methods, note)
            results.append(
                LoadResult(
                    load=load,
                    groups=[prompt.group for prompt in prompts],
                    tokens=[len(prompt.tokens) for prompt in prompts],
                    by_method=found,
                )
            )
            save(report())
        return report()
    finally:
        runner.close()


def _note(progress: Callable[[str], None], load: str, step: str) -> None:
    progress(f"{load}: {step}")


def _with_nulls(specifications: Sequence[str], model: ServedModel) -> dict[str, Method]:
    """Return methods by their specifications, with the nulls of the first after it."""
    found: dict[str, Method] = {}
    for specification in specifications:
        method = resolve_method(specification)
        if isinstance(method, ModelSpecific):
            method = method.for_model(model)
        assert method is not None
        found[specification] = method
        if len(found) == 1:
            found |= _nulls(specification)
    return found


def _nulls(specification: str) -> dict[str, Method]:
    """Return a method's nulls, see ``reuse_nulls``, and what repairs nothing."""
    method = resolve_method(specification)
    found: dict[str, Method] = {}
    title = f"{specification} no repair"
    if isinstance(method, CacheCraft) and method.alpha:
        found[title] = replace(method, alpha=0.0)
    if isinstance(method, KVShare) and method.ratio:
        found[title] = replace(method, ratio=0.0, refresh=0)
    if isinstance(method, CacheBlend) and method.ratio:
        found[title] = replace(method, ratio=0.0)
    return found | {name: null for name, (_, null) in reuse_nulls([specification]).items()}


class _Replay:
    """Answers loads on one runner, which is one engine's at a time."""

    def __init__(self, runner: CpuRunner, eos: Sequence[int], steps: int) -> None:
        self._runner = runner
        self._eos = eos
        self._steps = steps

    def replay(
        self,
        prompts: Sequence[LoadPrompt],
        methods: Mapping[str, Method],
        progress: Callable[[str], None],
    ) -> dict[str, MethodAnswers]:
        """Return what came of some prompts, exactly and under each method.

        Args:
            prompts: in order.
            methods: by name.
            progress: called with the method's name and the prompt's.
        """
        shape = (len(prompts), self._steps, self._runner.config.vocab)
        answers = [prompt.answer for prompt in prompts]
        found: dict[str, MethodAnswers] = {}
        with tempfile.TemporaryFile() as file:
            # Too much for memory: a row of the vocabulary per token of each answer.
            exact = np.memmap(cast(Any, file), np.float32, "w+", shape=shape)
            for name, method in {FULL: None, **methods}.items():
                given = answers
                answers = []
                ask = _Asking(self._runner, self._eos, method, self._steps)
                measured: list[LoadAnswer] = []
                for number, (prompt, answer) in enumerate(zip(prompts, given, strict=True)):
                    progress(f"{name}, {prompt.name}")
                    tokens, rows = ask.answer(prompt, answer)
                    if method is None:
                        exact[number, : len(rows)] = rows
                    answers.append(tokens)
                    measured.append(ask.measured(prompt, exact[number, : len(rows)], rows))
                held, cached = ask.held()
                found[name] = MethodAnswers(
                    answers=measured, method_bytes=held, cached_tokens=cached
                )
        return found


class _Asking:
    """An engine that asks for given answers under one method, and measures."""

    def __init__(
        self, runner: CpuRunner, eos: Sequence[int], method: Method | None, steps: int
    ) -> None:
        self._forcing = _Forcing(runner)
        self._steps = steps
        self._memory = _Memory()
        methods = {FULL: None, "method": method, "memory": cast(Method, self._memory)}
        self._name = FULL if method is None else "method"
        self._engine = Engine(
            cast(Any, self._forcing),
            eos,
            EngineOptions(max_running=1),
            policy=scheduler_policy(ModelOptions(), runner.config.layers),
            find_method=methods.__getitem__,
        )
        self._ask([0], "memory", 1)

    def answer(self, prompt: LoadPrompt, given: Sequence[int]) -> tuple[list[int], Float32Array]:
        """Return a prompt's answer, which begins as given, and its log-probabilities.

        They are float32 [tokens, vocab].
        """
        self._forcing.start(given)
        tokens = self._ask(prompt.tokens, self._name, self._steps, prompt.contexts)
        return tokens, np.stack(self._forcing.seen)

    def measured(self, prompt: LoadPrompt, exact: Float32Array, rows: Float32Array) -> LoadAnswer:
        """Return what the last answer took and how far it is from the exact one."""
        forcing, layers = self._forcing, self._forcing.config.layers
        divergence = (np.exp(exact) * (exact - rows)).sum(axis=1)
        right = len(prompt.answer)
        return LoadAnswer(
            ttft_seconds=forcing.seconds,
            row_layers=forcing.row_layers - (len(rows) - 1) * layers,
            reused_tokens=self._reused,
            divergence=max(float(divergence.mean()), 0.0),
            first_same=bool(exact[0].argmax() == rows[0].argmax()),
            right=rows[:right].argmax(axis=1).tolist() == list(prompt.answer),
        )

    def held(self) -> tuple[int, int]:
        """Return bytes that the method remembers, and how many slots are cached."""
        kind = self._memory.kind
        assert kind is not None
        return kind.nbytes, self._engine.stats().slots_cached

    def _ask(
        self, tokens: Sequence[int], method: str, steps: int, contexts: tuple[int, ...] = ()
    ) -> list[int]:
        sampling = EngineSamplingParams(temperature=0.0, max_tokens=steps)
        self._engine.add(
            EngineRequest(
                request_id="asked",
                token_ids=list(tokens),
                sampling=sampling,
                method=method,
                contexts=contexts,
            )
        )
        found: list[int] = []
        self._reused = 0
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error is not None:
                    raise GenerationError(output.error)
                self._reused = max(self._reused, output.reused_tokens)
                found += output.token_ids
        return found


class _Memory:
    """A method that does nothing, and is told who puts methods of reuse to work.

    Implements ``methods.reuse.sequence.OwnSequences``.
    """

    def __init__(self) -> None:
        self.kind: ReuseKind | None = None

    def attach(self, name: str, request: RequestFacts, shared: ReuseKind) -> None:
        """See ``OwnSequences.attach``."""
        self.kind = shared


class _Forcing:
    """A runner whose answer begins as given; it keeps distributions and counts rows.

    Attributes:
        seen: log-probabilities [vocab] of each token.
        row_layers: rows times layers since the start.
        seconds: from the start to the first logits.
    """

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self.start(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def start(self, answer: Sequence[int]) -> None:
        """Begin an answer with some tokens; the model goes on after them."""
        self._answer = answer
        self.seen: list[Float32Array] = []
        self.row_layers, self.seconds = 0, 0.0
        self._started = time.perf_counter()

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """See ``Runner.forward``."""
        self.row_layers += batch.rows * self._runner.config.layers
        return self._noted(self._runner.forward(batch))

    def run_layers(
        self, batch: ForwardBatch, hidden: Float32Array, first: int, end: int
    ) -> RunnerArray:
        """See ``Runner.run_layers``."""
        self.row_layers += batch.rows * (end - first)
        return self._runner.run_layers(batch, hidden, first, end)

    def compute_logits(self, batch: ForwardBatch, hidden: Float32Array) -> RunnerArray:
        """See ``Runner.compute_logits``."""
        return self._noted(self._runner.compute_logits(batch, hidden))

    def argmax_tokens(self, logits: Float32Array) -> list[int]:
        """See ``Runner.argmax_tokens``."""
        number = len(self.seen) - 1
        if number < len(self._answer):
            return [self._answer[number]] * len(logits)
        return self._runner.argmax_tokens(logits)

    def _noted(self, logits: Float32Array) -> Float32Array:
        if len(logits) and not self.seen:
            self.seconds = time.perf_counter() - self._started
        self.seen += [log_softmax(row) for row in logits]
        return logits


def load_table(report: LoadReport) -> ResultTable:
    """Return a row per load and method."""
    sizes, options = report.options.sizes, report.options
    rows = [_row(report, result, name) for result in report.results for name in result.by_method]
    return ResultTable(
        title=f"Loads with KV from elsewhere: {report.model}",
        rows=rows,
        labels=2,
        caption=f"{report.model}; made of files of {report.text}. Agents: {sizes.prompts} questions"
        f" to three agents, with two contents each, near-duplicates of {sizes.families} texts but"
        f" for every fifth. Chunks: {sizes.shown} of {sizes.pool}, drawn by Zipf's law. Edits:"
        f" {sizes.texts} texts, and {sizes.prompts} edited ones. Pieces have {sizes.piece}"
        " tokens; each method answers all of a load, beginning with nothing. Rows x layers: of all"
        " prompts, as a share of what they take with the prefix cache alone. Reused: prompts for"
        " which the method took KV from elsewhere; the next four columns are of these alone. KL: of"
        " the exact distributions from these, in nats per token of an answer of up to"
        f" {options.steps} tokens, the same text for all. Minus the method's: that of a null, or"
        " without repair, paired, with its 95% interval (whole groups resampled: questions, texts)."
        " Same first: the most likely first token is the exact answer's. Right: all tokens of the"
        " right answer are the most likely ones; in brackets, of exact answers to these prompts."
        " Remembered: by the method, beside KV in slots, its index included; KV cached: in slots at"
        f" the end. {report.machine};"
        f" load {report.busy:.1f} when it began.",
    )


def _row(report: LoadReport, result: LoadResult, name: str) -> dict[str, str]:
    own, full = result.by_method[name], result.by_method[FULL]
    first = report.options.methods[result.load][0]
    of = first if name in _nulls(first) else name
    reference = result.by_method[of]
    used = [number for number, each in enumerate(reference.answers) if each.reused_tokens]
    taken = [own.answers[number] for number in used]
    exact = [full.answers[number] for number in used]
    work = sum(each.row_layers for each in own.answers)
    shown = {
        "load": f"{result.load} ({len(result.groups)})",
        "method": name,
        "rows x layers": f"{work / sum(each.row_layers for each in full.answers):.2f}",
        "reused": f"{len(used)}" if name != FULL else "",
    }
    cells = dict.fromkeys(("KL", "minus the method's", "same first", "right"), "")
    if used:
        cells["KL"] = f"{fmean(each.divergence for each in taken):.4f}"
        cells["same first"] = f"{fmean(each.first_same for each in taken):.0%}"
        right, of_exact = (fmean(each.right for each in answers) for answers in (taken, exact))
        cells["right"] = f"{right:.0%} (exact: {of_exact:.0%})"
    elif name == FULL:
        cells["right"] = f"{fmean(each.right for each in full.answers):.0%}"
    if used and of != name:
        cells["minus the method's"] = difference_cell(
            [reference.answers[number].divergence for number in used],
            [each.divergence for each in taken],
            [result.groups[number] for number in used],
            digits=4,
        )
    cached = own.cached_tokens * report.slot_bytes
    cells["remembered"] = f"{own.method_bytes / 1e6:.1f} MB"
    cells["KV cached"] = f"{cached / 1e6:.0f} MB"
    return shown | cells


def reuse_loads(
    loads: Annotated[
        str, typer.Option(help=f"Loads, separated by commas: {', '.join(LOADS)}.")
    ] = ",".join(LOADS),
    methods: Annotated[
        str,
        typer.Option(
            help="Methods with their options, separated by blanks, for every load; the first is"
            " compared with its nulls. If not set, each load has the method that it is a case of."
        ),
    ] = "",
    model: LoadedModelOption = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Questions, prompts with chunks, edited prompts.")
    ] = 16,
    piece: Annotated[
        int, typer.Option(min=60, help="Tokens of a content, a chunk, a part of an edited text.")
    ] = 80,
    steps: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 64,
    seed: Annotated[int, typer.Option(help="All chance follows from it.")] = 0,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods of reuse on whole loads: agents, retrieved chunks, edited prompts.

    Each beside exact answers and beside its nulls: rows times layers, KL over the answers' tokens,
    answers right, and what the method remembers.
    """
    chosen = [load.strip() for load in loads.split(",")]
    for load in chosen:
        if load not in LOADS:
            raise OptionError(f"--loads takes {', '.join(LOADS)}, not {load!r}")
    known = [name for name in methods_of("reuse") if name != "ape"]
    asked = {load: (methods or METHODS[load]).split() for load in chosen}
    for specification in (each for named in asked.values() for each in named):
        resolve_method(specification)
        if parse_name(specification) not in known:
            raise MidfillError(f"--methods takes {', '.join(known)}, not {specification}")
    options = LoadOptions(
        methods=asked, sizes=LoadSizes(prompts=prompts, piece=piece), steps=steps, seed=seed
    )
    with show_steps("loading") as progress:
        report = measure_loads(
            model or DEFAULT_MODEL, options, threads=threads, progress=progress, save=saver(json)
        )
    publish(report, load_table(report), section="reuse-loads", json=json, docs=docs)
