"""AcceptanceRates: how often drafted tokens were right, by kind of evidence."""

from collections.abc import Sequence as SequenceOf

from midfill.engine.scheduling.drafting import CERTAIN, EVIDENCE_KINDS, SPELLED, match_evidence

# The weight of earlier observations is multiplied by this at each new one.
_DECAY = 0.98
_PRIOR_WEIGHT = 10.0
# Initial rates, measured on greedy completions of Python files by a small model.
_PRIORS = {
    CERTAIN: 1.0,
    SPELLED: 0.4,
    **{
        match_evidence(length, places, agree): rate
        for (places, agree), rates in {
            (2, False): (0.25, 0.25, 0.25, 0.3, 0.3, 0.4),
            (1, True): (0.27, 0.6, 0.67, 0.78, 0.8, 0.9),
            (2, True): (0.6, 0.8, 0.88, 0.95, 0.96, 0.97),
        }.items()
        for length, rate in zip((1, 2, 3, 4, 6, 10), rates, strict=True)
    },
}
# Nothing but certain tokens is estimated to be likelier.
_MAX_RATE = 0.98


class AcceptanceRates:
    """Exponentially weighted acceptance rates over all sequences of an engine."""

    def __init__(self) -> None:
        priors = [_PRIORS[kind] for kind in range(EVIDENCE_KINDS)]
        self._right = [rate * _PRIOR_WEIGHT for rate in priors]
        self._seen = [_PRIOR_WEIGHT] * EVIDENCE_KINDS

    def rate(self, evidence: int) -> float:
        """Return the estimated probability that a token with this kind of evidence is right."""
        return self._right[evidence] / self._seen[evidence]

    def observe(self, evidence: int, right: bool) -> None:
        """Record whether a token with this kind of evidence was right."""
        self._right[evidence] = self._right[evidence] * _DECAY + right
        self._seen[evidence] = self._seen[evidence] * _DECAY + 1.0

    def acceptance_probabilities(
        self, evidence: SequenceOf[int], calibration: float
    ) -> tuple[float, ...]:
        """Return the probabilities that the first, first two, ... tokens of a draft are all right.

        Args:
            evidence: the kind of evidence for each token.
            calibration: the sequence's ``Calibration.factor``.
        """
        probabilities = []
        probability = 1.0
        for kind in evidence:
            if kind != CERTAIN:
                probability *= min(self.rate(kind) * calibration, _MAX_RATE)
            probabilities.append(probability)
        return tuple(probabilities)


class Calibration:
    """How often drafts are right in one sequence, relative to the estimates.

    Some answers copy from their document and others don't; a few tokens show which.
    """

    __slots__ = ("_expected", "_right")

    _DECAY = 0.95
    _PRIOR_WEIGHT = 8.0

    def __init__(self) -> None:
        self._right = 0.0
        self._expected = 0.0

    @property
    def factor(self) -> float:
        """Right tokens per expected right token; 1 at the start."""
        return (self._right + self._PRIOR_WEIGHT) / (self._expected + self._PRIOR_WEIGHT)

    def observe(self, rate: float, right: bool) -> None:
        """Record whether a drafted token was right, given its estimated probability ``rate``."""
        self._right = self._right * self._DECAY + right
        self._expected = self._expected * self._DECAY + rate
