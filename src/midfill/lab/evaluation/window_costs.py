"""What a window costs: prompt tokens that the engine computes for the requests around a hole."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from midfill.infill.request import InfillRequest
from midfill.infill.window import WindowRule
from midfill.lab.evaluation.problems import Problem

_TYPED = "value"
_BATCH = 16  # holes; what a batch computed is still cached when its carets move


class WindowCost(msgspec.Struct, frozen=True):
    """Prompt tokens that one hole's requests compute with one window.

    Attributes:
        opened: of the first request, with the caret at the end of the line before the hole's.
        moved: of the next one, with the caret at the hole.
        typed: of the next one, after a word was typed there.
    """

    opened: int
    moved: int
    typed: int


class TokenCounter(Protocol):
    """A model that says what requests cost."""

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """Return the prompt tokens that each request computes; all are asked at once."""
        ...


def measure_costs(
    model: TokenCounter, problems: Sequence[Problem], rule: WindowRule
) -> list[WindowCost]:
    """Count what every hole's requests compute with a window of its whole document."""
    costs: list[WindowCost] = []
    for start in range(0, len(problems), _BATCH):
        batch = problems[start : start + _BATCH]
        steps = zip(*(_requests(problem, rule) for problem in batch), strict=True)
        counts = [model.count_computed(step) for step in steps]
        costs += [WindowCost(*found) for found in zip(*counts, strict=True)]
    return costs


def _requests(problem: Problem, rule: WindowRule) -> list[InfillRequest]:
    """Return the requests of a document that is opened, moved in, and typed in."""
    text, caret = problem.prefix + problem.suffix, len(problem.prefix)
    line = text.rfind("\n", 0, caret) + 1
    above = line - 1 if line else text.find("\n", caret) + 1 or len(text)
    typed = problem.prefix + _TYPED, problem.suffix
    # No other request has this tenant, so nothing of the document is cached when it is opened.
    tenant = f"{problem.id} {rule.before}/{rule.after} costs"
    return [
        InfillRequest(prefix=prefix, suffix=suffix, window=rule, tenant=tenant)
        for prefix, suffix in ((text[:above], text[above:]), (text[:caret], text[caret:]), typed)
    ]
