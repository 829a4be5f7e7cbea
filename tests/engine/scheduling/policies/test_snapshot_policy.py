"""SnapshotPolicy: shortly before a prompt's end, and where prompts part from cached text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.scheduling.policies.snapshot_policy import SnapshotPolicy

POLICY = SnapshotPolicy()


@given(st.integers(1, 5000), st.data())
def test_places_are_in_the_part_that_is_computed(length: int, data: st.DataObject) -> None:
    known = data.draw(st.integers(0, length - 1))
    computed = data.draw(st.integers(0, known))
    head = data.draw(st.integers(0, length))
    places = POLICY.positions(length, computed, known, head)
    assert list(places) == sorted(set(places))
    assert all(computed < place < length for place in places)
    assert len(places) <= 3


@given(st.integers(1, 5000), st.integers(0, 40), st.integers(0, 15))
def test_a_prompt_that_grows_computes_little_more_than_what_was_typed(
    length: int, typed: int, retokenised: int
) -> None:
    """From the last prompt's snapshots, however its last word is cut anew."""
    places = POLICY.positions(length, 0, 0)
    same = max(length - retokenised, 0)
    usable = max((place for place in places if place <= same), default=0)
    assert length + typed - usable <= typed + 64


def test_prompts_that_grow_by_a_few_tokens_share_a_snapshot() -> None:
    assert POLICY.positions(100, 0, 0) == (64,)
    assert POLICY.positions(105, 64, 99) == ()
    assert POLICY.positions(112, 64, 104) == (96,)


def test_where_a_prompt_parts_from_cached_text_others_will() -> None:
    assert POLICY.positions(1000, 0, 300) == (300, 960)
    assert POLICY.positions(1000, 250, 300) == (960,)  # not far before, there is one already
    assert POLICY.positions(1000, 0, 980) == (960,)  # nor if there will be


def test_where_the_text_before_the_suffix_ends_a_longer_one_will_go_on() -> None:
    assert POLICY.positions(1000, 0, 0, head=700) == (684, 960)
    assert POLICY.positions(1000, 660, 660, head=700) == (960,)


@pytest.mark.parametrize("wrong", [{"spacing": 0}, {"margin": 0}, {"max_repeated": -1}], ids=str)
def test_impossible_places_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        SnapshotPolicy(**wrong)
