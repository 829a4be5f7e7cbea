"""``bench speed`` of two versions, both loaded at once and asked in turn; of many streams, too.

Requests a fraction of a second apart meet the same speed of the machine, so their ratio is far
less noisy than that of two runs. Both versions get the same prompts: old, new, new, old, and so on,
never two at a time.

What is left is a bias of the two processes themselves: where their memory happens to lie makes one
of them up to 5% faster for as long as it lives. So both are started anew for each observation, in
alternating order, and the median ratio of the requests in between is the observation.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks.compare.copies import Copies, version_copies
from benchmarks.compare.ratios import RatioFigure, VersionsReport, check_pairs, ratio_figure
from benchmarks.compare.speed_worker import SpeedWorker, Timing
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.system.machine import describe_machine
from midfill.system.process import ended_by_sigterm
from midfill_lab.bench.documents import Prompts

_PREFILLED = 5120
"""Prompt tokens per version and restart, about; short prompts are repeated more often."""
_PREFILL_REPEATS = (4, 20)
_DECODE_REPEATS = 8
_STREAMS_REPEATS = 4

Progress = Callable[[str], None]


class CompareSpeedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        model: its name or path.
        prefill: prompt lengths, in tokens.
        contexts: tokens before the first decoded one.
        streams: answers decoded at once, beside single ones; 1 for none.
        stream_contexts: tokens before the first decoded one where several are decoded.
        decoded: tokens decoded at each context.
        repeats: requests of each figure per version and restart; None takes 8 for decode, 4 for
            that of several streams, and for prefill the more, the shorter the prompt.
        threads: of the kernels; None takes all cores.
    """

    model: str
    prefill: tuple[int, ...] = (512, 1500)
    contexts: tuple[int, ...] = (16, 1500)
    streams: int = 16
    stream_contexts: tuple[int, ...] = (16, 500)
    decoded: int = 64
    repeats: int | None = None
    threads: int | None = None

    def arguments(self) -> list[str]:
        """Return the arguments of ``compare speed`` that stand for these options."""
        arguments = ["--model", self.model]
        for name, lengths in (("prefill", self.prefill), ("contexts", self.contexts)):
            arguments += [f"--{name}", ",".join(map(str, lengths))]
        arguments += ["--streams", str(self.streams)]
        if self.streams > 1:
            arguments += ["--stream-contexts", ",".join(map(str, self.stream_contexts))]
        for name, number in (("repeats", self.repeats), ("threads", self.threads)):
            arguments += [] if number is None else [f"--{name}", str(number)]
        return arguments


def compare_speed(
    options: CompareSpeedOptions,
    commit: str,
    *,
    pairs: int,
    package: Path | None = None,
    progress: Progress = lambda _: None,
) -> VersionsReport:
    """Measure prefill and decode of the running tree and of a commit of its repository.

    Each version is loaded once before: that compiles its kernels and packs weights.

    Args:
        commit: anything that git resolves to a commit.
        pairs: how often both are restarted; at least ``MIN_PAIRS``.
        package: the package's folder in a git checkout; None takes the running one.
        progress: receives what is being done.

    Raises:
        ValueError: fewer pairs than ``MIN_PAIRS``.
        MidfillError: no git checkout, no such commit or model, lengths that the model can't take,
            or a version that fails.
    """
    check_pairs(pairs)
    requests = _Requests(options)
    with ended_by_sigterm(), version_copies(commit, package) as copies:
        for copy in copies.in_turn(0):
            progress(f"{copy.name}: loading {options.model} for the first time")
            with SpeedWorker(copy, copies.folder) as worker:
                worker.load(options.model, options.threads)
        started = time.monotonic()
        restarts = [
            _observe(requests, copies, restart, _headed(progress, restart, pairs, started))
            for restart in range(pairs)
        ]
        return VersionsReport(
            benchmark="speed",
            arguments=options.arguments(),
            machine=describe_machine(),
            old=copies.old.version,
            new=copies.new.version,
            pairs=pairs,
            figures=_figures(requests.loads, restarts),
        )


def _headed(progress: Progress, restart: int, restarts: int, started: float) -> Progress:
    """Return a function that reports steps of one restart, with the time that is left."""
    head = f"restart {restart + 1} of {restarts}"
    if restart:
        left = (time.monotonic() - started) / restart * (restarts - restart)
        head += f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"
    return lambda step: progress(f"{head}: {step}")


@dataclass(frozen=True)
class _Load:
    """The requests of one figure.

    Attributes:
        prompt_tokens: length of their prompts: random tokens, or real code to decode after.
        decoded: tokens of the answer if decode is measured; 0 for prefill.
        repeats: requests per version and restart.
        streams: requests at once.
    """

    prompt_tokens: int
    decoded: int
    repeats: int
    streams: int = 1

    @property
    def name(self) -> str:
        """Name of the figure."""
        how = "decode at" if self.decoded else "prefill of"
        at_once = f", {self.streams} streams" if self.streams > 1 else ""
        return f"{how} {self.prompt_tokens} tokens{at_once}"

    @property
    def answer_tokens(self) -> int:
        """Tokens of each answer."""
        return self.decoded or 1

    def measure(self, worker: SpeedWorker, prompts: Sequence[Sequence[int]]) -> float:
        """Return a version's tokens per second, of all streams together.

        Raises:
            MidfillError: the answer has no pieces to time decode by, or the version fails.
        """
        if self.streams > 1:
            seconds = worker.measure_streams(prompts, self.decoded)
            return self.streams * self.decoded / seconds
        return self._rate(worker.measure(prompts[0], self.answer_tokens))

    def _rate(self, timing: Timing) -> float:
        if not self.decoded:
            return self.prompt_tokens / timing.first_seconds
        if not timing.later_tokens:
            raise MidfillError(f"{self.name} can't be timed: the answer came in one piece")
        return timing.later_tokens / timing.later_seconds


class _Requests:
    """The requests of a comparison.

    Raises:
        MidfillError: no such model, or lengths that it can't take.

    Attributes:
        options: what to measure.
        loads: one per figure.
    """

    def __init__(self, options: CompareSpeedOptions) -> None:
        checkpoint = open_checkpoint(resolve(options.model))
        self.options = options
        fewest, most = _PREFILL_REPEATS
        self.loads = [
            *(
                _Load(n, 0, options.repeats or min(max(_PREFILLED // n, fewest), most))
                for n in options.prefill
            ),
            *(
                _Load(n, options.decoded, options.repeats or _DECODE_REPEATS)
                for n in options.contexts
            ),
        ]
        if options.streams > 1:
            repeats = options.repeats or _STREAMS_REPEATS
            self.loads += [
                _Load(n, options.decoded, repeats, options.streams) for n in options.stream_contexts
            ]
        context = checkpoint.config.context
        for load in self.loads:
            if load.prompt_tokens + load.answer_tokens > context:
                raise MidfillError(f"{load.name}: {options.model} has {context} tokens of context")
        self._prompts = Prompts(checkpoint.tokenizer, seed=0)
        self._stretches = 0

    def prompts(self, load: _Load) -> list[list[int]]:
        """Return the next prompts: for prefill a new one, which no cache holds.

        To decode after, they are real code: after random tokens a model may write what is no text,
        and pieces of text are what is timed. Short stretches may recur; decode is timed after the
        first token, so the cache doesn't matter. Several streams always get the same prompts, which
        take longer to compute than their answers.
        """
        if not load.decoded:
            return [self._prompts.random_tokens(load.prompt_tokens)]
        room = max(*self.options.contexts, *self.options.stream_contexts)
        if load.streams == 1:
            self._stretches += 1
            return [self._prompts.code_tokens(self._stretches, load.prompt_tokens, room)]
        return [
            self._prompts.code_tokens(stream, load.prompt_tokens, room)
            for stream in range(load.streams)
        ]


class _Observation(NamedTuple):
    """A figure of one restart.

    Attributes:
        old, new: median rates in tokens/s.
        ratio: median of new / old over the requests in turn.
    """

    old: float
    new: float
    ratio: float


def _observe(
    requests: _Requests, copies: Copies, restart: int, progress: Progress
) -> list[_Observation]:
    """Start both versions, measure every figure once, and end them."""
    options = requests.options
    with ExitStack() as stack:
        workers = {
            copy.side: stack.enter_context(SpeedWorker(copy, copies.folder))
            for copy in copies.in_turn(restart)
        }
        progress("loading")
        for worker in workers.values():  # one after the other, in alternating order
            worker.load(options.model, options.threads)
        for load in requests.loads:
            prompts = requests.prompts(load)
            for worker in workers.values():
                load.measure(worker, prompts)
        observations = []
        for load in requests.loads:
            progress(load.name)
            observations.append(_observe_load(requests, load, workers, copies, restart))
        return observations


def _observe_load(
    requests: _Requests,
    load: _Load,
    workers: Mapping[str, SpeedWorker],
    copies: Copies,
    restart: int,
) -> _Observation:
    rates: dict[str, list[float]] = {side: [] for side in workers}
    for repeat in range(load.repeats):
        prompts = requests.prompts(load)
        for copy in copies.in_turn(restart + repeat):
            rates[copy.side].append(load.measure(workers[copy.side], prompts))
    ratios = [new / old for old, new in zip(rates["old"], rates["new"], strict=True)]
    return _Observation(median(rates["old"]), median(rates["new"]), median(ratios))


def _figures(
    loads: Sequence[_Load], restarts: Sequence[Sequence[_Observation]]
) -> list[RatioFigure]:
    """Return a figure per load from all its observations."""
    figures = []
    for load, observations in zip(loads, zip(*restarts, strict=True), strict=True):
        old, new, ratios = zip(*observations, strict=True)
        figures.append(ratio_figure(load.name, "tokens/s", old, new, ratios))
    return figures
