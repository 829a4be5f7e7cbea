"""AcceptanceRates and Calibration: how often drafts are right, learned from earlier ones."""

import pytest

from midfill.engine.scheduling.acceptance import AcceptanceRates, Calibration
from midfill.engine.scheduling.drafting import CERTAIN, EVIDENCE_KINDS, SPELLED, match_evidence

ONE_PLACE = match_evidence(5, 1, True)


def test_every_kind_of_evidence_has_a_rate_to_start_from() -> None:
    rates = AcceptanceRates()
    assert all(0.0 < rates.rate(kind) <= 1.0 for kind in range(EVIDENCE_KINDS))
    for length in range(1, 20):
        disputed, single, unanimous = (
            rates.rate(match_evidence(length, places, agree))
            for places, agree in ((2, False), (1, True), (2, True))
        )
        assert disputed < single < unanimous


@pytest.mark.parametrize("period", [1, 2, 5])
def test_rates_follow_the_observations(period: int) -> None:
    rates = AcceptanceRates()
    for number in range(500):
        rates.observe(ONE_PLACE, number % period == 0)
    assert rates.rate(ONE_PLACE) == pytest.approx(1 / period, abs=0.05)
    assert rates.rate(SPELLED) == AcceptanceRates().rate(SPELLED)


def test_probabilities_multiply() -> None:
    rates = AcceptanceRates()
    one = rates.rate(ONE_PLACE)
    assert rates.acceptance_probabilities((ONE_PLACE,) * 3, 1.0) == pytest.approx(
        (one, one**2, one**3)
    )
    assert rates.acceptance_probabilities((), 1.0) == ()


def test_certain_tokens_stay_certain() -> None:
    evidence = (CERTAIN, CERTAIN, ONE_PLACE)
    probabilities = AcceptanceRates().acceptance_probabilities(evidence, 0.1)
    assert probabilities[:2] == (1.0, 1.0)
    assert probabilities[2] < 0.1


def test_calibration_raises_the_rates_of_sequences_that_copy() -> None:
    rates, copies, invents = AcceptanceRates(), Calibration(), Calibration()
    assert copies.factor == 1.0
    for _ in range(20):
        copies.observe(0.5, True)
        invents.observe(0.5, False)
    assert copies.factor > 1.2
    assert invents.factor < 0.6
    assert rates.acceptance_probabilities((ONE_PLACE,), 50.0)[0] < 1.0
