"""Means over a run's probes and holes, variant by variant."""

import math
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import NamedTuple

from midfill.lab.bench.methods.probes import Score, Task
from midfill.lab.bench.methods.results import ModelResult
from midfill.lab.bench.methods.variants import FULL


class Recall(NamedTuple):
    """How well known answers are recalled.

    Attributes:
        likeliest: share of the answers that a greedy answer would be.
        logprob: mean log-probability per token, in nats.
        answers: how many there are.
    """

    likeliest: float
    logprob: float
    answers: int

    def __str__(self) -> str:
        return f"{self.likeliest:.0%} {self.logprob:.2f}"


class Prediction(NamedTuple):
    """How well held-out code is predicted.

    Attributes:
        perplexity: of its tokens.
        divergence: mean Kullback-Leibler divergence from full KV, in nats per token.
        agreement: share of tokens at which full KV has the same likeliest token.
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
        fmean(one.likeliest for one in scores), fmean(one.logprob for one in scores), len(scores)
    )


def prediction(result: ModelResult, specification: str) -> Prediction | None:
    """Return how well held-out code is predicted; None where nothing was measured."""
    scores = _scores(result, specification, {"code"}, None, slice(None))
    if not scores:
        return None

    def mean(value: Callable[[Score], float]) -> float:
        return sum(one.tokens * value(one) for one in scores) / sum(one.tokens for one in scores)

    return Prediction(
        math.exp(-mean(lambda one: one.logprob)),
        mean(lambda one: one.divergence),
        mean(lambda one: one.agreement),
    )


def exact_holes(result: ModelResult, specification: str) -> float | None:
    """Return the share of holes filled with what was there; None where none was asked."""
    found = [one.exact[specification] for one in result.holes if specification in one.exact]
    return fmean(found) if found else None


def labels(result: ModelResult, tasks: Iterable[Task]) -> list[str]:
    """Return the labels of some tasks' probes, in order."""
    wanted = set(tasks)
    return list(dict.fromkeys(one.label for one in result.probes if one.task in wanted))


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
