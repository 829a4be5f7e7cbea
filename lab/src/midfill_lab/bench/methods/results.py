"""What a run measures, and what it found; a file of results can be continued."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from midfill.errors import MidfillError, OptionError
from midfill.methods.registry import (
    METHODS,
    OFF,
    check_name,
    methods_of,
    parse_name,
    resolve_method,
    split_methods,
)
from midfill.system.machine import Machine
from midfill_lab.bench.methods.nulls import null_titles

Task = Literal["needle", "multi-key", "turns", "requests", "code"]

NEEDLES: tuple[Task, ...] = ("needle", "multi-key")
"""Tasks whose answers are so short that no method decides again while they are written."""


class MethodsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        context: tokens of a context with needles, or that several questions share.
        depths: where needles are.
        needles: contexts per depth, each with one needle and with several.
        shared: contexts of each kind that several questions share.
        questions: asked about each of these.
        code: held-out files whose next tokens are predicted.
        code_context, code_tokens: tokens of a file before the predicted ones, and these.
        holes: lines to fill in.
        speed_context, short_context: tokens of the contexts at which decoding is timed.
        decoded: tokens decoded at each.
        repeats: runs of everything that is timed; figures are medians.
        seed: of all random choices.
    """

    context: int = 2000
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    needles: int = 8
    shared: int = 1
    questions: int = 4
    code: int = 8
    code_context: int = 1500
    code_tokens: int = 128
    holes: int = 40
    speed_context: int = 6000
    short_context: int = 1500
    decoded: int = 64
    repeats: int = 3
    seed: int = 0


QUICK = MethodsOptions(
    context=1000,
    depths=(0.1, 0.5, 0.9),
    needles=1,
    shared=1,
    questions=2,
    code=2,
    code_context=1000,
    code_tokens=64,
    holes=8,
    speed_context=2000,
    short_context=500,
    decoded=24,
    repeats=1,
)


class Score(msgspec.Struct, frozen=True):
    """How a known answer fared.

    Attributes:
        tokens: of the answer.
        greedy: whether each was the most likely, so that a greedy answer would be this one.
        logprob: mean log-probability of its tokens, in nats.
        divergence: mean Kullback-Leibler divergence from full KV's distributions, in nats.
        agreement: share of its tokens at which full KV has the same most likely token.
    """

    tokens: int
    greedy: bool
    logprob: float
    divergence: float
    agreement: float


class ProbeResult(msgspec.Struct, frozen=True):
    """A probe's scores: by specification, one per answer.

    Attributes:
        group: see ``probes.Probe``.
    """

    name: str
    task: Task
    label: str
    group: str
    scores: dict[str, list[Score]]


class HoleResult(msgspec.Struct, frozen=True):
    """A hole's answers by specification, and whether each is what was there.

    Attributes:
        group: the file that it is from.
    """

    name: str
    group: str
    answers: dict[str, str]
    exact: dict[str, bool]


class CostRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a method.

    Attributes:
        ttft_seconds: of a prompt at the short context, of which nothing is cached.
        tokens_per_second: while decoding at the long context.
        times_full, times_short: how many times as fast it decodes there as full KV does at the long
            and at the short context moments before.
        peak: the largest number of slots that the prompt at the short context held.
    """

    ttft_seconds: float
    tokens_per_second: float
    times_full: float
    times_short: float
    peak: int


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a method holds and how fast it is, at one length of context.

    Attributes:
        context, short_context: tokens of the long and of the short prompt.
        after_prefill: see ``session.Holding``.
        bytes: of these slots, with the lists of their cells and the cells' terms.
        runs: one per repeat.
    """

    context: int
    short_context: int
    after_prefill: int
    bytes: int
    runs: list[CostRun]


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one model's run has found so far.

    Attributes:
        fingerprint: digest of the model.
        backend: what ran it.
        text: where real text comes from.
        refused: by specification, why the model can't be used with a method.
        probes, holes: in the order of the run.
        costs: by specification.
    """

    model: str
    fingerprint: str
    backend: str
    text: str = ""
    refused: dict[str, str] = {}
    probes: list[ProbeResult] = []
    holes: list[HoleResult] = []
    costs: dict[str, Cost] = {}


class Variant(msgspec.Struct, frozen=True):
    """A method as it is measured.

    Attributes:
        specification: for the engine: "snapkv:budget=0.25".
        method: the specification without a budget that was added to it.
        budget: the budget that was added; None where the method takes none, or states its own.
        null: on what a null spends the method's budget, see ``nulls``; "" is the method itself.
        of: the specification of the method that a null belongs to.
    """

    specification: str
    method: str
    budget: float | None = None
    null: str = ""
    of: str = ""


class MethodsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        load: processes that ran or waited for a core in the minute before costs were measured, on
            average.
        variants: without full KV, which is always measured.
        finished: whether nothing is missing.
        format: version of this record.
    """

    machine: Machine
    load: float
    options: MethodsOptions
    variants: list[Variant]
    models: list[ModelResult]
    finished: bool = False
    format: int = 3


def read_methods_report(path: Path) -> MethodsReport:
    """Read a file of results.

    Raises:
        MidfillError: it can't be read, or is no such file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=MethodsReport)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MidfillError(f"{path} holds no results of bench methods: {error}") from error


FULL = OFF
"""Specification of full KV, beside which everything is measured."""


FULL_KV = Variant(FULL, "full KV")


def choose_variants(
    methods: str | None, budgets: Sequence[float], *, nulls: bool = False
) -> list[Variant]:
    """Return the variants to measure, without full KV.

    Args:
        methods: specifications separated by commas; None takes every method there is. What
            follows a colon, up to the next name, are options: "snapkv,cake:window=16,kernel=3".
        budgets: tokens per layer, or shares of the prompt below 1, for methods that take any.
        nulls: whether each method's nulls follow it.

    Raises:
        InvalidRequestError: there is no such method or option, or a value doesn't fit.
        MidfillError: the list names nothing.
    """
    every = [*methods_of("evict"), *methods_of("quantize")]
    specifications = every if methods is None else split_specifications(methods)
    if not specifications:
        raise OptionError(f"--methods names nothing; there are {', '.join(every)}")
    variants = [
        variant for text in specifications for variant in _at_budgets(text, sorted(budgets)[::-1])
    ]
    for variant in variants:
        resolve_method(variant.specification)
    if not nulls:
        return variants
    return [one for variant in variants for one in (variant, *_nulls_of(variant))]


_COUNTS = {
    "needles": "needles",
    "questions": "shared",
    "code": "code",
    "lines": "holes",
    "costs": "repeats",
}
PARTS = tuple(_COUNTS)
"""What can be measured without the rest."""


def choose_parts(options: MethodsOptions, parts: Sequence[str]) -> MethodsOptions:
    """Return options that measure some of ``PARTS`` only."""
    left_out = {count: 0 for part, count in _COUNTS.items() if part not in parts}
    return msgspec.structs.replace(options, **left_out)


def merge_parts(earlier: MethodsOptions, now: MethodsOptions) -> MethodsOptions | None:
    """Return options of two runs that go into one file; None if they don't go together.

    They may measure other ``PARTS``; what both measure they measure alike.
    """
    added = {
        count: getattr(earlier, count) for count in _COUNTS.values() if not getattr(now, count)
    }
    merged = msgspec.structs.replace(now, **added)
    left_out = {count: 0 for count in _COUNTS.values() if not getattr(earlier, count)}
    return merged if msgspec.structs.replace(merged, **left_out) == earlier else None


def parse_budgets(text: str) -> tuple[float, ...]:
    """Return budgets separated by commas.

    Raises:
        MidfillError: one is no number above 0, or there is none.
    """
    try:
        budgets = tuple(float(part) for part in text.split(","))
    except ValueError:
        budgets = ()
    if not budgets or min(budgets) <= 0:
        raise OptionError(
            f"--budgets takes shares below 1, or tokens per layer, like 0.5,0.25, not {text!r}"
        )
    return budgets


def split_specifications(text: str) -> list[str]:
    """Split a list of specifications at the commas that don't separate options."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _nulls_of(variant: Variant) -> list[Variant]:
    return [
        msgspec.structs.replace(
            variant,
            specification=f"{variant.specification} {title}",
            null=title,
            of=variant.specification,
        )
        for title in null_titles(variant.specification)
    ]


def _at_budgets(specification: str, budgets: Sequence[float]) -> list[Variant]:
    parts = split_methods(specification)
    for part in parts:
        check_name(parse_name(part))
    # Of what is kept of a prompt; other methods' budgets are of what is read.
    evicting = methods_of("evict")
    taking = [
        place
        for place, part in enumerate(parts)
        if (name := parse_name(part)) in evicting
        and "budget" in METHODS[name].options()
        and "budget=" not in part
    ]
    if not taking:
        return [Variant(specification, specification)]
    return [
        Variant("+".join(_with_budget(parts, taking, budget)), specification, budget)
        for budget in budgets
    ]


def _with_budget(parts: Sequence[str], taking: Sequence[int], budget: float) -> list[str]:
    """Return specifications of which those at ``taking`` have a budget."""
    return [
        f"{part}{',' if ':' in part else ':'}budget={budget:g}" if place in taking else part
        for place, part in enumerate(parts)
    ]
