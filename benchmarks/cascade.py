"""CAKE one-shot and as a cascade, on the same prompts: slots, time to the first token, answers.

Slots are counted after every step: those that are neither free nor evictable. Both compute each
prompt anew. What they keep is compared by the tokens that follow in the same file, computed over
it: their KL from full KV, and from each other.
"""

import os
from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean, median
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.arrays import Float32Array
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.methods.registry import OFF
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.methods.probes import Haystacks
from midfill_lab.bench.methods.session import Holding, MethodSession
from midfill_lab.cli.bench.options import (
    JsonOption,
)
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

BUDGETS = (0.5, 0.25, 0.125)


class CascadeCase(msgspec.Struct, frozen=True, kw_only=True):
    """One budget at one length.

    Attributes:
        tokens: of the prompt.
        budget: share of the prompt that stays.
        bound: slots that what stays and one whole layer fill.
        peak, one_shot_peak: the most slots that were held, as a cascade and one-shot.
        held: slots held once the first token is there.
        ttft, one_shot_ttft: seconds to the first token, medians.
        divergence, one_shot_divergence: from full KV, in nats per token.
        between: of the cascade from one-shot.
    """

    tokens: int
    budget: float
    bound: int
    peak: int
    one_shot_peak: int
    held: int
    ttft: float
    one_shot_ttft: float
    divergence: float
    one_shot_divergence: float
    between: float


class CascadeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    backend: str
    machine: Machine
    load: float
    text: str
    repeats: int
    files: int
    following: int
    cases: list[CascadeCase]


def measure_cascade(
    model: str,
    *,
    lengths: Sequence[int] = (1500, 6000),
    repeats: int = 3,
    files: int = 4,
    following: int = 64,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CascadeReport:
    """Compare CAKE one-shot with its cascade.

    Args:
        model: its name or path.
        lengths: tokens of the prompts.
        repeats: runs of each, whose medians are reported.
        files: prompts whose continuation is scored.
        following: tokens of each that are scored.
        threads: of the CPU; None takes all cores.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be found or loaded, or a prompt doesn't fit.
    """
    progress(f"loading {model}")
    session = MethodSession(model, threads)
    load = os.getloadavg()[0]
    try:
        haystacks = Haystacks(session.encode, 0)
        run = _Run(session, haystacks, repeats, files, following)
        cases = []
        for length, budget in product(lengths, BUDGETS):
            progress(f"{length} tokens, budget {budget:g}")
            cases.append(run.case(length, budget))
        return CascadeReport(
            model=model,
            backend=session.info.backend,
            machine=describe_machine(),
            load=load,
            text=haystacks.source,
            repeats=repeats,
            files=files,
            following=following,
            cases=cases,
        )
    finally:
        session.close()


class _Run:
    """What all cases of a run have in common."""

    def __init__(
        self,
        session: MethodSession,
        haystacks: Haystacks,
        repeats: int,
        files: int,
        following: int,
    ) -> None:
        self._session, self._haystacks = session, haystacks
        self._repeats, self._files, self._following = repeats, files, following
        self._full: dict[tuple[int, int], Float32Array] = {}

    def case(self, length: int, budget: float) -> CascadeCase:
        """Measure one budget at one length."""
        one_shot = f"cake:budget={budget:g}"
        cascade = f"{one_shot},cascade=1"
        tokens = self._text(0, length)[:length]
        held: dict[str, list[Holding]] = {one_shot: [], cascade: []}
        for _ in range(self._repeats):
            for method, runs in held.items():
                runs.append(self._session.hold(tokens, method, 2, cold=True))
        apart = [self._divergences(number, length, one_shot, cascade) for number in self._numbers]
        layers = self._session.layers
        return CascadeCase(
            tokens=length,
            budget=budget,
            bound=-(-(round(budget * length) * layers + length) // layers),
            peak=max(run.peak for run in held[cascade]),
            one_shot_peak=max(run.peak for run in held[one_shot]),
            held=held[cascade][0].after_prefill,
            ttft=median(run.ttft_seconds for run in held[cascade]),
            one_shot_ttft=median(run.ttft_seconds for run in held[one_shot]),
            one_shot_divergence=fmean(divergence for divergence, _, _ in apart),
            divergence=fmean(other for _, other, _ in apart),
            between=fmean(both for _, _, both in apart),
        )

    @property
    def _numbers(self) -> range:
        return range(1, self._files + 1)

    def _text(self, number: int, tokens: int) -> list[int]:
        text = "".join(self._haystacks.lines(3 * number, tokens + 100))
        return self._session.encode(text)

    def _divergences(
        self, number: int, length: int, one_shot: str, cascade: str
    ) -> tuple[float, float, float]:
        """Return the KL of one-shot and cascade from full KV, and of the second from the first."""
        tokens = self._text(number, length + self._following)[: length + self._following]

        def scored(method: str) -> Float32Array:
            return self._session.log_likelihoods(tokens, method, length, length + 1)

        if (number, length) not in self._full:
            self._full[number, length] = scored(OFF)
        full, first, second = self._full[number, length], scored(one_shot), scored(cascade)
        return _divergence(full, first), _divergence(full, second), _divergence(first, second)


def _divergence(p: Float32Array, q: Float32Array) -> float:
    """Return KL(p || q) per token, from log-probabilities [tokens, vocab]."""
    return max(float((np.exp(p) * (p - q)).sum(-1).mean()), 0.0)


def cascade_table(report: CascadeReport) -> ResultTable:
    """Return the table of a report."""
    return ResultTable(
        rows=[_cells(case) for case in report.cases],
        labels=0,
        caption=(
            f"{report.model}, {report.backend}: source text of {report.text}, no token cached."
            " Slots: the most that were neither free nor evictable after any step; bound: what"
            " stays and one whole layer, in slots; held: once the first token is there. TTFT:"
            f" medians of {report.repeats} runs in turn. KL: of the {report.following} tokens"
            f" that follow in {report.files} files, in nats per token. {report.machine}; load"
            f" {report.load:.1f}."
        ),
    )


def _cells(case: CascadeCase) -> dict[str, str]:
    return {
        "tokens": f"{case.tokens:,}",
        "budget": f"{case.budget:.3g}",
        "slots one-shot": f"{case.one_shot_peak:,}",
        "slots cascade": f"{case.peak:,}",
        "bound": f"{case.bound:,}",
        "held": f"{case.held:,}",
        "TTFT ms one-shot": f"{case.one_shot_ttft * 1e3:,.0f}",
        "TTFT ms cascade": f"{case.ttft * 1e3:,.0f}",
        "KL one-shot": f"{case.one_shot_divergence:.4f}",
        "KL cascade": f"{case.divergence:.4f}",
        "KL between": f"{case.between:.5f}",
    }


def cascade(
    model: ModelArgument = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, whose medians are shown.")] = 3,
    files: Annotated[int, typer.Option(min=1, help="Prompts whose next tokens are scored.")] = 4,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure CAKE's cascade beside its one-shot form: slots, time, and what answers see."""
    with show_steps("loading") as progress:
        report = measure_cascade(
            model or DEFAULT_MODEL,
            repeats=repeats,
            files=files,
            threads=threads,
            progress=progress,
        )
    publish(report, cascade_table(report), section="cascade", json=json, docs=docs)
