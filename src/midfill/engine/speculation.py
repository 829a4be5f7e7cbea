"""Speculation: drafts for an engine's sequences, and what is learnt from how they fare.

A draft is only a guess at what the sampler will choose, so it never changes an answer; see
``engine.advance`` for how it is verified (after Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", ICML 2023).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from midfill.engine.acceptance import AcceptanceRates
from midfill.engine.drafting import CERTAIN, SPELLED, Draft, prompt_lookup
from midfill.engine.sequence import Sequence
from midfill.engine.step_cost import StepCost

_MOST_TOKENS = 16


@dataclass
class DraftCounts:
    """Counters since the engine's start.

    Attributes:
        drafts: drafts that were verified.
        tokens: their tokens.
        accepted: of these, the ones that were right, all before them too.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


class Speculation:
    """Implements scheduler.DraftView.

    Attributes:
        counts: what came of the drafts.
    """

    def __init__(self, sequences: Mapping[int, Sequence], cost: StepCost) -> None:
        """Draft for ``sequences``, the engine's by id; ``cost`` is told of every step."""
        self.counts = DraftCounts()
        self._sequences = sequences
        self._cost = cost
        self._rates = AcceptanceRates()

    def chances(self, sequence_id: int) -> tuple[float, ...]:
        """Draft for a sequence; see ``DraftView.chances``. It keeps the draft until it advances."""
        sequence = self._sequences[sequence_id]
        if sequence.background or len(sequence.answers) > 1:
            return ()
        sequence.draft = self._draft(sequence)
        return self._rates.chances(sequence.draft.evidence, sequence.calibration.factor)

    def seconds(self, rows: int, context: float) -> float:
        """See ``DraftView.seconds``."""
        return self._cost.seconds(rows, context)

    def step_took(self, rows: int, context: float, seconds: float) -> None:
        """A step of so many rows was run; each attended to ``context`` tokens on average."""
        self._cost.observe(rows, context, seconds)

    def advanced(self, sequence: Sequence, tried: int, gained: int) -> None:
        """Compare a sequence's draft with the tokens that came, whether it was run or not.

        So rates stay known even while no draft is worth running.

        Args:
            sequence: with its new tokens.
            tried: draft tokens that were run.
            gained: tokens that came.
        """
        draft, sequence.draft = sequence.draft, None
        if draft is None or not gained:
            return
        came = sequence.tokens[len(sequence.tokens) - gained :].tolist()
        right = 0
        for kind, guess, token in zip(draft.evidence, draft.tokens.tolist(), came, strict=False):
            if kind != CERTAIN:
                sequence.calibration.observe(self._rates.rate(kind), guess == token)
                self._rates.observe(kind, guess == token)
            if guess != token:
                break
            right += 1
        if tried:
            self.counts.drafts += 1
            self.counts.tokens += tried
            self.counts.accepted += min(right, tried)

    def _draft(self, sequence: Sequence) -> Draft:
        """What may come next, up to a token that would end the answer."""
        most = min(_MOST_TOKENS, sequence.limit - sequence.length - 1)
        spelled = [] if sequence.constraint is None else sequence.constraint.spelling()[:most]
        tokens = sequence.tokens
        if spelled:
            known = np.array([token_id for token_id, _ in spelled], dtype=np.int32)
            tokens = np.concatenate((tokens, known))
        found = prompt_lookup(tokens, most - len(spelled))
        evidence = tuple(CERTAIN if certain else SPELLED for _, certain in spelled)
        draft = Draft(
            np.concatenate((tokens[sequence.length :], found.tokens)), evidence + found.evidence
        )
        for place, token_id in enumerate(draft.tokens.tolist()):
            if token_id in sequence.ends:
                return Draft(draft.tokens[: place + 1], draft.evidence[: place + 1])
        return draft
