"""Drafts: the latest place with the longest common context, against a search by brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.engine.scheduling.drafting import (
    CERTAIN,
    EVIDENCE_KINDS,
    MAX_MATCH_LENGTH,
    SPELLED,
    AcceptanceRates,
    Calibration,
    longest_match,
    match_evidence,
    prompt_lookup,
)

# Few different tokens, so that much repeats; some sequences are one phrase over and over.
SEQUENCES = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.builds(
        lambda phrase, times, tail: phrase * times + tail,
        st.lists(st.integers(0, 50), min_size=1, max_size=25),
        st.integers(1, 4),
        st.lists(st.integers(0, 2), max_size=2),
    ),
)


def common_context(tokens: list[int], place: int) -> int:
    """Count one by one how many tokens before ``place`` are the same as at the end."""
    length = 0
    while length < place and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return min(length, MAX_MATCH_LENGTH)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@settings(max_examples=400)
@given(SEQUENCES)
def test_the_longest_match_is_found_at_all_its_places(tokens: list[int]) -> None:
    contexts = {place: common_context(tokens, place) for place in range(1, len(tokens))}
    longest = max(contexts.values(), default=0)
    expected = [place for place, length in contexts.items() if length == longest > 0]
    places, length = longest_match(array(tokens))
    assert (places.tolist(), length) == (expected, longest)


@settings(max_examples=400)
@given(SEQUENCES, st.integers(0, 12))
def test_what_followed_the_latest_place_is_drafted(tokens: list[int], count: int) -> None:
    draft = prompt_lookup(array(tokens), count)
    contexts = [(common_context(tokens, place), place) for place in range(1, len(tokens))]
    length, latest = max(contexts, default=(0, 0))
    text = list(tokens)
    if length:
        for offset in range(count):
            text.append(text[latest + offset])
    assert draft.tokens.tolist() == text[len(tokens) :]
    assert len(draft.evidence) == len(draft.tokens)
    assert all(0 <= kind < EVIDENCE_KINDS for kind in draft.evidence)


@settings(max_examples=400)
@given(SEQUENCES)
def test_a_draft_is_a_chain_of_drafts_of_one_token(tokens: list[int]) -> None:
    # If the first tokens of a draft are right, the rest is drafted again, unless they create a
    # better match.
    draft = prompt_lookup(array(tokens), 6)
    for done in range(1, len(draft.tokens)):
        known = array(tokens + draft.tokens[:done].tolist())
        if longest_match(known)[0][-1] != longest_match(array(tokens))[0][-1] + done:
            break
        assert prompt_lookup(known, 1).tokens[0] == draft.tokens[done]


class TestEvidence:
    def test_one_place(self) -> None:
        draft = prompt_lookup(array([1, 2, 3, 4, 5, 1, 2]), 3)
        assert draft.tokens.tolist() == [3, 4, 5]
        assert draft.evidence == tuple(match_evidence(2 + i, 1, True) for i in range(3))

    def test_places_that_agree_for_a_while_and_then_do_not(self) -> None:
        draft = prompt_lookup(array([9, 1, 2, 7, 9, 1, 3, 8, 9]), 3)
        assert draft.tokens.tolist() == [1, 3, 8]
        assert draft.evidence == (
            match_evidence(1, 2, True),
            match_evidence(2, 2, False),
            match_evidence(3, 1, True),
        )

    def test_nothing_is_drafted_after_a_new_token(self) -> None:
        assert not prompt_lookup(array([1, 2, 1, 2, 3]), 4).evidence
        assert not prompt_lookup(array([1]), 4).evidence

    def test_kinds_are_distinguished(self) -> None:
        kinds = {
            match_evidence(length, places, agree)
            for length in range(1, 40)
            for places, agree in ((1, True), (2, True), (2, False))
        }
        assert len(kinds) == 18
        assert match_evidence(16, 1, True) == match_evidence(400, 1, True)


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
