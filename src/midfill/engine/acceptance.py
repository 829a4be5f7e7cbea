"""AcceptanceRates: how often drafts were right, by what spoke for them."""

from collections.abc import Sequence as SequenceOf

from midfill.engine.drafting import CERTAIN, EVIDENCE_KINDS, SPELLED, match_evidence

# Each new observation leaves so much of the weight of the ones before.
_MEMORY = 0.98
_PRIOR_WEIGHT = 10.0
# Greedy completions of Python files by a small model; where the engine starts from.
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
_MOST_LIKELY = 0.98


class AcceptanceRates:
    """Exponentially weighted rates over all sequences of an engine."""

    def __init__(self) -> None:
        priors = [_PRIORS[kind] for kind in range(EVIDENCE_KINDS)]
        self._right = [rate * _PRIOR_WEIGHT for rate in priors]
        self._seen = [_PRIOR_WEIGHT] * EVIDENCE_KINDS

    def rate(self, evidence: int) -> float:
        """Estimated probability that a token with this evidence is right."""
        return self._right[evidence] / self._seen[evidence]

    def observe(self, evidence: int, right: bool) -> None:
        """A token with this evidence was compared with the one that came."""
        self._right[evidence] = self._right[evidence] * _MEMORY + right
        self._seen[evidence] = self._seen[evidence] * _MEMORY + 1.0

    def chances(self, evidence: SequenceOf[int], calibration: float) -> tuple[float, ...]:
        """Probabilities that the first, the first two, ... tokens of a draft are all right.

        Args:
            evidence: of the draft's tokens.
            calibration: how much more often than expected this sequence's drafts are right.
        """
        chances = []
        chance = 1.0
        for kind in evidence:
            if kind != CERTAIN:
                chance *= min(self.rate(kind) * calibration, _MOST_LIKELY)
            chances.append(chance)
        return tuple(chances)


class Calibration:
    """How well drafts do in one sequence, measured against what was expected of them.

    Some answers copy and some don't; a few tokens tell. Starts at 1, which is as expected.
    """

    __slots__ = ("_expected", "_right")

    _MEMORY = 0.95
    _PRIOR_WEIGHT = 8.0

    def __init__(self) -> None:
        self._right = 0.0
        self._expected = 0.0

    @property
    def factor(self) -> float:
        """Right tokens for each one expected."""
        return (self._right + self._PRIOR_WEIGHT) / (self._expected + self._PRIOR_WEIGHT)

    def observe(self, rate: float, right: bool) -> None:
        """A token expected to be right with probability ``rate`` was compared."""
        self._right = self._right * self._MEMORY + right
        self._expected = self._expected * self._MEMORY + rate
