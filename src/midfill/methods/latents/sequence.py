"""PartedAnswer: a sequence whose rows after the prompt attend to each part of the latents alone."""

from dataclasses import replace

from midfill.arrays import Int32Array
from midfill.methods.latents.method import PartedLatents
from midfill.methods.sequence_method import (
    Aspect,
    PlainLengths,
    RequestFacts,
    SequenceMethod,
    SequenceRows,
    SequenceView,
)
from midfill.runners.forward.attention import AttentionPlan


class PartedAnswer(SequenceMethod):
    """Says of a sequence's rows whether they are an answer's.

    It says so by their positions alone, so which rows a step runs, drafts among them, changes
    nothing, and a preempted answer that is computed anew is computed as before.

    Args:
        name: how requests name the method.
        prompt: how many of the first tokens are computed exactly.
    """

    title = "the method of parted latents"
    changes = frozenset({Aspect.READS})
    needs = frozenset({Aspect.ROWS, Aspect.KEYS, Aspect.LISTS})

    def __init__(self, name: str, prompt: int) -> None:
        self.name = name
        self._prompt = prompt

    def cache_keys(self, tokens: Int32Array) -> Int32Array:
        """See ``SequenceMethod``: what comes after the prompt is not exact."""
        return tokens[: self._prompt]

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """See ``SequenceMethod``: what comes after the prompt is not exact."""
        return min(limit, self._prompt)

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``: a step runs rows of the prompt, or rows of the answer."""
        return self._prompt if sequence.computed < self._prompt else None

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        """See ``SequenceMethod``."""
        if first < self._prompt:
            return rows
        return rows._replace(plan=replace(rows.plan or AttentionPlan(), by_parts=True))


class PartedLatentsKind(PlainLengths):
    """Puts methods over parts of the latents to work."""

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``."""
        return PartedAnswer(name, request.prompt) if isinstance(method, PartedLatents) else None
