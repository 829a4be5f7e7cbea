"""The tables of a run: what is lost, where it is lost, what nulls do, and what is saved."""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, cast

from midfill_lab.bench.methods.results import (
    FULL,
    FULL_KV,
    NEEDLES,
    MethodsOptions,
    MethodsReport,
    ModelResult,
    Score,
    Task,
    Variant,
)
from midfill_lab.evaluation.report import estimate_cell, figure_cell
from midfill_lab.evaluation.summary import (
    Estimate,
    estimate_difference,
    estimate_mean,
    estimate_share,
)
from midfill_lab.reporting import ResultTable

_NOTHING = "-"
_BUSY = 0.5
"""Load per core from which on times mean little."""


def methods_tables(report: MethodsReport) -> list[ResultTable]:
    """Return up to four tables per model: what is lost, where, nulls, and what is saved.

    Columns of what was not measured are left out, and so are tables without any.
    """
    return [
        table for result in report.models for table in _tables(report, result) if table is not None
    ]


def _tables(report: MethodsReport, result: ModelResult) -> Iterator[ResultTable | None]:
    methods = [FULL_KV, *(one for one in _shown(report, result) if not one.null)]
    yield _quality(report, result, methods)
    yield _details(result, methods)
    if any(one.null for one in report.variants):
        yield _nulls(report, result)
    if result.costs:
        yield _costs(report, result, methods)


def _shown(report: MethodsReport, result: ModelResult) -> list[Variant]:
    return [one for one in report.variants if not {one.specification, one.of} & set(result.refused)]


def _filled(title: str, rows: Sequence[dict[str, str]], caption: str) -> ResultTable | None:
    """Return a table without the columns in which no row has anything; None if none is left."""
    labels = 2
    columns = [column for column in rows[0] if any(row[column] != _NOTHING for row in rows)]
    if len(columns) <= labels:
        return None
    kept = [{column: row[column] for column in columns} for row in rows]
    return ResultTable(title=title, rows=kept, labels=labels, caption=caption)


_INTERVALS = (
    "In brackets and after ±: 95% intervals (bootstrap over files; Clopper and Pearson's of shares"
    " of 0% and 100%)."
)


def _quality(
    report: MethodsReport, result: ModelResult, variants: Sequence[Variant]
) -> ResultTable | None:
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
                "code KL": _NOTHING if code is None else _mean(code.divergence, 4),
                "perplexity": _NOTHING if code is None else code.perplexity,
                "lines filled in": _NOTHING if holes is None else _share(holes),
            }
        )
    refused = "".join(f" {name}: {reason}." for name, reason in result.refused.items())
    code_files = sum(1 for probe in result.probes if probe.task == "code")
    code_text = (
        f"; code: {options.code_tokens} tokens after {options.code_context:,} in {code_files}"
        " files, KL in nats per token from full KV"
    )
    holes_text = f"; {len(result.holes)} lines to fill in, as midfill lays them out"
    return _filled(
        f"What methods cost: {result.model}",
        rows,
        f"{result.model}, {result.backend}; contexts of {options.context:,} tokens of"
        f" {result.text}{code_text if code_files else ''}{holes_text if result.holes else ''}."
        " Other cells: share of the known answers that greedy decoding gives, and the mean"
        f" log-probability of their tokens. {_INTERVALS} Budget: share of the"
        f" prompt that is kept, or tokens per layer.{_floor(result)}{refused}",
    )


def _details(result: ModelResult, variants: Sequence[Variant]) -> ResultTable | None:
    rows = []
    for variant in variants:
        row = _heads(variant)
        for depth in labels(result, ["needle"]):
            found = recall(result, variant.specification, ["needle", "multi-key"], label=depth)
            row[f"needle {depth}"] = _logprob(found)
        for kind in labels(result, ["requests"]):
            modes = [
                recall(result, variant.specification, [task], label=kind)
                for task in ("turns", "requests")
            ]
            row[kind] = " / ".join(_logprob(found) for found in modes)
        rows.append(row)
    return _filled(
        f"Where it is lost: {result.model}",
        rows,
        "Mean log-probability of the known answers' tokens: of needles by depth, and of"
        f" questions about shared contexts by kind (turns / requests). {_INTERVALS} A kind with"
        " one shared context has none.",
    )


def _nulls(report: MethodsReport, result: ModelResult) -> ResultTable | None:
    """Return the table of methods, each followed by its nulls and what it gains over them."""
    rows = [_null_row(result, FULL_KV)]
    rows += [_null_row(result, variant) for variant in _shown(report, result)]
    return _filled(
        f"Methods beside their nulls: {result.model}",
        rows,
        f"{result.model}, {result.backend}; {_asked(report, result)}. A"
        " null spends as many cells as the method above it on something else. Gain: the method's"
        " minus the null's on the same prompts of both kinds: needles found, in points, and mean"
        " log-probability per token of the answer, in nats. The method is better or worse where"
        " the latter's interval is all on one side of 0. KL less: the null's from full KV minus the"
        f" method's, in nats per token of code. {_INTERVALS}{_floor(result)}",
    )


def _asked(report: MethodsReport, result: ModelResult) -> str:
    """Return what nulls were asked."""
    options, tasks = report.options, [probe.task for probe in result.probes]
    needles, code = sum(task in NEEDLES for task in tasks), tasks.count("code")
    asked = []
    if needles:
        asked.append(
            f"{needles} prompts of {options.context:,} tokens of {result.text}, half of them with"
            " one needle, half with one among others"
        )
    if code:
        asked.append(
            f"{options.code_tokens} tokens of code after {options.code_context:,} in {code} files"
        )
    return "; ".join(asked)


def _null_row(result: ModelResult, variant: Variant) -> dict[str, str]:
    needle, others = (recall(result, variant.specification, [task]) for task in NEEDLES)
    gained = gain(result, variant) if variant.null else None
    code = prediction(result, variant.specification)
    nearer = nearness(result, variant) if variant.null else None
    spent = "by the method" if variant != FULL_KV else _NOTHING
    return {
        **_heads(variant),
        "budget spent": variant.null or spent,
        "needle": _text(needle),
        "among others": _text(others),
        "gain, points": _NOTHING if gained is None else estimate_cell(gained.found, signed=True),
        "gain, nats": _NOTHING if gained is None else figure_cell(gained.logprob, signed=True),
        "method is": _NOTHING if gained is None else gained.verdict,
        "code KL": _NOTHING if code is None else _mean(code.divergence, 3),
        "KL less, nats": _NOTHING if nearer is None else figure_cell(nearer, signed=True),
    }


def _floor(result: ModelResult) -> str:
    """Return a sentence on tasks at which the model fails with full KV; "" where there is none."""
    titles = {
        "needle": "needles",
        "multi-key": "needles among others",
        "turns": "answers in turns",
        "requests": "answers to requests",
    }
    failed = [title for task, title in titles.items() if is_beyond(result, [cast(Task, task)])]
    if not failed:
        return ""
    return (
        f" This model finds no {' and no '.join(failed)} with full KV: shares of 0% there are the"
        " model's, not the methods'."
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
        f" median of {options.repeats} runs; in brackets the lowest and the highest. Slots held:"
        " neither free nor evictable once the first token is there; MB: theirs, with lists and"
        " terms of their cells. Peak (the most slots, beside full KV's) and TTFT: of a prompt of"
        f" {short:,} tokens, none of them cached. Last columns: how many times as fast it decodes"
        " as full KV at so many tokens, moments before."
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
        "TTFT ms": _spread([1000 * run.ttft_seconds for run in cost.runs], 0),
        "tokens/s": _spread([run.tokens_per_second for run in cost.runs], 0),
        beside[0]: _spread([run.times_full for run in cost.runs], 2),
        beside[1]: _spread([run.times_short for run in cost.runs], 2),
    }


def _spread(values: Sequence[float], digits: int) -> str:
    """Return the median, the lowest and the highest."""
    middle, low, high = (f"{x:.{digits}f}" for x in (median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"


def _heads(variant: Variant) -> dict[str, str]:
    budget = variant.budget
    if budget is None:
        shown = "all" if variant == FULL_KV else "its own"
    else:
        shown = f"{budget:.1%}".replace(".0%", "%") if budget < 1 else f"{budget:g}"
    return {"method": variant.method, "budget": shown}


def _text(value: object) -> str:
    return _NOTHING if value is None else str(value)


def _logprob(found: "Recall | None") -> str:
    return _NOTHING if found is None else _mean(found.logprob, 2)


def _share(found: Estimate) -> str:
    """Return a share in percent with its interval."""
    return f"{found.value:.0%} [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def _mean(found: Estimate, digits: int) -> str:
    """Return a mean and half the width of its interval, if it has any: one group has none."""
    if found.low == found.high:
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} ±{(found.high - found.low) / 2:.{digits}f}"


class Recall(NamedTuple):
    """How well known answers are recalled.

    Attributes:
        found: share of the answers that a greedy answer would be.
        logprob: mean log-probability per token, in nats.
    """

    found: Estimate
    logprob: Estimate

    def __str__(self) -> str:
        return f"{_share(self.found)} {_mean(self.logprob, 2)}"


class Gain(NamedTuple):
    """What a method gains over one of its nulls, on the same prompts.

    Attributes:
        found: share of the answers, the method's minus the null's.
        logprob: mean log-probability per token, likewise, in nats.
        is_beyond: whether full KV finds no answer either.
    """

    found: Estimate
    logprob: Estimate
    is_beyond: bool

    @property
    def verdict(self) -> str:
        """What the interval of the log-probability says of the method."""
        if self.is_beyond:
            return "full KV finds none"
        if self.logprob.low > 0:
            return "better"
        return "worse" if self.logprob.high < 0 else "no gain shown"


class Prediction(NamedTuple):
    """How well held-out code is predicted.

    Attributes:
        logprob: mean log-probability of its tokens, in nats.
        divergence: mean Kullback-Leibler divergence from full KV, in nats per token.
        agreement: share of tokens at which full KV has the same most likely token.
    """

    logprob: Estimate
    divergence: Estimate
    agreement: Estimate

    @property
    def perplexity(self) -> str:
        """Of its tokens, with its interval."""
        value, high, low = (
            math.exp(-x) for x in (self.logprob.value, self.logprob.low, self.logprob.high)
        )
        return f"{value:.2f} [{low:.2f}, {high:.2f}]"


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
    scores, groups = _scores(result, specification, set(tasks), label, turns)
    if not scores:
        return None
    return Recall(
        estimate_share([score.greedy for score in scores], groups),
        estimate_mean([score.logprob for score in scores], groups),
    )


def gain(result: ModelResult, null: Variant) -> Gain | None:
    """Return what a null's method gains over it by needles; None where not both were measured."""
    own, groups = _scores(result, null.of, set(NEEDLES), None, slice(None))
    other, others = _scores(result, null.specification, set(NEEDLES), None, slice(None))
    if not own or groups != others:
        return None
    return Gain(
        estimate_difference([s.greedy for s in other], [s.greedy for s in own], groups),
        estimate_difference([s.logprob for s in other], [s.logprob for s in own], groups),
        is_beyond(result, NEEDLES),
    )


def nearness(result: ModelResult, null: Variant) -> Estimate | None:
    """Return how much nearer to full KV a null's method is on code; None if not both were asked.

    KL from full KV in nats per token, the null's minus the method's.
    """
    own, groups = _scores(result, null.of, {"code"}, None, slice(None))
    other, others = _scores(result, null.specification, {"code"}, None, slice(None))
    if not own or groups != others:
        return None
    return estimate_difference([s.divergence for s in own], [s.divergence for s in other], groups)


def is_beyond(result: ModelResult, tasks: Iterable[Task]) -> bool:
    """Return whether the model finds none of some tasks' answers, with full KV."""
    found = recall(result, FULL, tasks)
    return found is not None and found.found.value == 0


def prediction(result: ModelResult, specification: str) -> Prediction | None:
    """Return how well held-out code is predicted; None where nothing was measured."""
    scores, groups = _scores(result, specification, {"code"}, None, slice(None))
    if not scores:
        return None
    return Prediction(
        *(
            estimate_mean([getattr(score, name) for score in scores], groups)
            for name in ("logprob", "divergence", "agreement")
        )
    )


def exact_holes(result: ModelResult, specification: str) -> Estimate | None:
    """Return the share of holes filled with what was there; None where none was asked."""
    asked = [hole for hole in result.holes if specification in hole.exact]
    if not asked:
        return None
    exact = [hole.exact[specification] for hole in asked]
    return estimate_share(exact, [hole.group for hole in asked])


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
    own, full = (max(run.peak for run in result.costs[name].runs) for name in (specification, FULL))
    return own / full


def _scores(
    result: ModelResult, specification: str, tasks: set[Task], label: str | None, turns: slice
) -> tuple[list[Score], list[str]]:
    """Return a variant's scores, and the group of each."""
    found = [
        (score, probe.group)
        for probe in result.probes
        if probe.task in tasks and label in (None, probe.label)
        for score in probe.scores.get(specification, [])[turns]
    ]
    return [score for score, _ in found], [group for _, group in found]
