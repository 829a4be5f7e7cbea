"""The tables of a run: what is lost, where it is lost, and what is saved."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from midfill_lab.bench.methods.results import (
    FULL,
    FULL_KV,
    MethodsOptions,
    MethodsReport,
    ModelResult,
    Score,
    Task,
    Variant,
)
from midfill_lab.reporting import ResultTable

_NOTHING = "-"
_BUSY = 0.5
"""Load per core from which on times mean little."""


def methods_tables(report: MethodsReport) -> list[ResultTable]:
    """Return three tables per model: what is lost, where it is lost, and what is saved."""
    return [
        make(report, result, _shown(report, result))
        for result in report.models
        for make in (_quality, _details, _costs)
    ]


def _shown(report: MethodsReport, result: ModelResult) -> list[Variant]:
    return [
        FULL_KV,
        *(variant for variant in report.variants if variant.specification not in result.refused),
    ]


def _quality(
    report: MethodsReport, result: ModelResult, variants: Sequence[Variant]
) -> ResultTable:
    options = report.options
    rows = []
    for variant in variants:
        name = variant.specification
        code, holes = prediction(result, name), exact_holes(result, name)
        rows.append(
            {
                **_heads(variant),
                "needle": _text(recall(result, name, ["needle"])),
                "among others": _text(recall(result, name, ["multi-key"])),
                "turn 1": _text(recall(result, name, ["turns"], turns=slice(1))),
                "later turns": _text(recall(result, name, ["turns"], turns=slice(1, None))),
                "requests": _text(recall(result, name, ["requests"])),
                "code KL": _NOTHING if code is None else f"{code.divergence:.4f}",
                "perplexity": _NOTHING if code is None else f"{code.perplexity:.2f}",
                "lines filled in": _NOTHING if holes is None else f"{holes:.0%}",
            }
        )
    refused = "".join(f" {name}: {reason}." for name, reason in result.refused.items())
    code_files = sum(1 for probe in result.probes if probe.task == "code")
    return ResultTable(
        title=f"What methods cost: {result.model}",
        rows=rows,
        labels=2,
        caption=f"{result.model}, {result.backend}; contexts of {options.context:,} tokens of"
        f" {result.text}; code: {options.code_tokens} tokens after {options.code_context:,} in"
        f" {code_files} files, KL in nats per token from full KV; {len(result.holes)} lines to fill"
        " in, as midfill lays them out. Other cells: share of the known answers that greedy"
        " decoding gives, and the mean log-probability of their tokens. Budget: share of the"
        f" prompt that is kept, or tokens per layer.{refused}",
    )


def _details(
    report: MethodsReport, result: ModelResult, variants: Sequence[Variant]
) -> ResultTable:
    rows = []
    for variant in variants:
        row = _heads(variant)
        for depth in labels(result, ["needle"]):
            found = recall(result, variant.specification, ["needle", "multi-key"], label=depth)
            row[f"needle {depth}"] = _NOTHING if found is None else f"{found.logprob:.2f}"
        for kind in labels(result, ["requests"]):
            modes = [
                recall(result, variant.specification, [task], label=kind)
                for task in ("turns", "requests")
            ]
            cells = (_NOTHING if found is None else f"{found.logprob:.2f}" for found in modes)
            row[kind] = " / ".join(cells)
        rows.append(row)
    return ResultTable(
        title=f"Where it is lost: {result.model}",
        rows=rows,
        labels=2,
        caption="Mean log-probability of the known answers' tokens: of needles by depth, and of"
        " questions about shared contexts by kind (turns / requests).",
    )


def _costs(report: MethodsReport, result: ModelResult, variants: Sequence[Variant]) -> ResultTable:
    options = report.options
    rows = [
        {**_heads(variant), **_cost_cells(result, variant.specification, options)}
        for variant in variants
    ]
    full = result.costs.get(FULL_KV.specification)
    context = options.speed_context if full is None else full.context
    short = options.short_context if full is None else full.short_context
    busy = report.load > _BUSY * report.machine.cores
    warning = (
        f" Other work was running (load {report.load:.1f} on {report.machine.cores} cores): times"
        " and rates are not to be relied on."
        if busy
        else ""
    )
    return ResultTable(
        title=f"What methods save: {result.model}",
        rows=rows,
        labels=2,
        caption=f"A prompt of {context:,} tokens, {options.decoded} decoded, without speculation,"
        f" median of {options.repeats} runs. Slots held: neither free nor evictable once the first"
        " token is there; MB: theirs, with the lists of their cells. Peak (the most slots, beside"
        f" full KV's) and TTFT: of a prompt of {short:,} tokens, none of them cached. Last"
        " columns: how many times as fast it decodes as full KV at so many tokens, moments before."
        f" {report.machine}.{warning}",
    )


def _cost_cells(result: ModelResult, specification: str, options: MethodsOptions) -> dict[str, str]:
    cost = result.costs.get(specification)
    beside = tuple(f"x at {n:,}" for n in (options.speed_context, options.short_context))
    heads = ("slots held", "of full KV", "MB", "peak", "TTFT ms", "tokens/s")
    if cost is None:
        return dict.fromkeys((*heads, *beside), _NOTHING)
    share, peak = held_share(result, specification), peak_share(result, specification)
    return {
        "slots held": f"{cost.after_prefill:,}",
        "of full KV": _NOTHING if share is None else f"{share:.1%}",
        "MB": f"{cost.bytes / 1e6:.1f}",
        "peak": _NOTHING if peak is None else f"{peak:.0%}",
        "TTFT ms": f"{cost.ttft_seconds * 1000:.0f}",
        "tokens/s": f"{cost.tokens_per_second:.0f}",
        beside[0]: f"{median(cost.times_full):.2f}x",
        beside[1]: f"{median(cost.times_short):.2f}x",
    }


def _heads(variant: Variant) -> dict[str, str]:
    budget = variant.budget
    if budget is None:
        shown = "all" if variant == FULL_KV else "its own"
    else:
        shown = f"{budget:.1%}".replace(".0%", "%") if budget < 1 else f"{budget:g}"
    return {"method": variant.method, "budget": shown}


def _text(value: object) -> str:
    return _NOTHING if value is None else str(value)


class Recall(NamedTuple):
    """How well known answers are recalled.

    Attributes:
        greedy: share of the answers that a greedy answer would be.
        logprob: mean log-probability per token, in nats.
        answers: how many there are.
    """

    greedy: float
    logprob: float
    answers: int

    def __str__(self) -> str:
        return f"{self.greedy:.0%} {self.logprob:.2f}"


class Prediction(NamedTuple):
    """How well held-out code is predicted.

    Attributes:
        perplexity: of its tokens.
        divergence: mean Kullback-Leibler divergence from full KV, in nats per token.
        agreement: share of tokens at which full KV has the same most likely token.
    """

    perplexity: float
    divergence: float
    agreement: float


def recall(
    result: ModelResult,
    specification: str,
    tasks: Iterable[Task],
    *,
    label: str | None = None,
    turns: slice = slice(None),
) -> Recall | None:
    """Return the recall of some tasks' answers; None where nothing was measured.

    Args:
        result: of a model.
        specification: the variant's.
        tasks: which.
        label: of the probes; None takes all.
        turns: which of a probe's answers.
    """
    scores = _scores(result, specification, set(tasks), label, turns)
    if not scores:
        return None
    return Recall(
        fmean(score.greedy for score in scores),
        fmean(score.logprob for score in scores),
        len(scores),
    )


def prediction(result: ModelResult, specification: str) -> Prediction | None:
    """Return how well held-out code is predicted; None where nothing was measured."""
    scores = _scores(result, specification, {"code"}, None, slice(None))
    if not scores:
        return None

    def mean(value: Callable[[Score], float]) -> float:
        return sum(score.tokens * value(score) for score in scores) / sum(
            score.tokens for score in scores
        )

    return Prediction(
        math.exp(-mean(lambda score: score.logprob)),
        mean(lambda score: score.divergence),
        mean(lambda score: score.agreement),
    )


def exact_holes(result: ModelResult, specification: str) -> float | None:
    """Return the share of holes filled with what was there; None where none was asked."""
    found = [hole.exact[specification] for hole in result.holes if specification in hole.exact]
    return fmean(found) if found else None


def labels(result: ModelResult, tasks: Iterable[Task]) -> list[str]:
    """Return the labels of some tasks' probes, in order."""
    wanted = set(tasks)
    return list(dict.fromkeys(probe.label for probe in result.probes if probe.task in wanted))


def held_share(result: ModelResult, specification: str) -> float | None:
    """Return the slots that a variant holds after prefill, as a share of full KV's."""
    if specification not in result.costs or FULL not in result.costs:
        return None
    return result.costs[specification].after_prefill / result.costs[FULL].after_prefill


def peak_share(result: ModelResult, specification: str) -> float | None:
    """Return the most slots that a variant held, as a share of full KV's most."""
    if specification not in result.costs or FULL not in result.costs:
        return None
    return result.costs[specification].peak / result.costs[FULL].peak


def _scores(
    result: ModelResult, specification: str, tasks: set[Task], label: str | None, turns: slice
) -> list[Score]:
    return [
        score
        for probe in result.probes
        if probe.task in tasks and label in (None, probe.label)
        for score in probe.scores.get(specification, [])[turns]
    ]
