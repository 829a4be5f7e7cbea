"""Fragments join to their text, and tokens broken by a cut are found."""

import dataclasses
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from midfill.lab.training.fragments import broken_token_mask, draw_cuts, split_at
from midfill.lab.training.recipe import DataRecipe

SEEDS = st.integers(0, 10**6)
RECIPE = DataRecipe()


@given(st.integers(0, 200), st.none() | st.integers(0, 200), SEEDS)
def test_cuts_are_sorted_and_inside_the_text(length: int, caret: int | None, seed: int) -> None:
    cuts = draw_cuts(length, caret, RECIPE, random.Random(seed))
    assert cuts == sorted(set(cuts))
    assert all(0 < cut < length for cut in cuts)
    if caret is not None and 0 < caret < length:
        assert caret in cuts


@given(st.integers(2, 200), SEEDS)
def test_without_further_cuts_only_the_caret_is_one(length: int, seed: int) -> None:
    recipe = dataclasses.replace(RECIPE, fragment_share=0.0, typed_share=0.0)
    assert draw_cuts(length, 1, recipe, random.Random(seed)) == [1]
    assert draw_cuts(length, None, recipe, random.Random(seed)) == []


@given(SEEDS)
def test_typed_text_is_cut_every_few_characters_before_the_caret_only(seed: int) -> None:
    recipe = dataclasses.replace(RECIPE, fragment_share=0.0, typed_share=1.0, typed_characters=60)
    cuts = draw_cuts(500, 300, recipe, random.Random(seed))
    assert cuts[-1] == 300
    assert cuts[0] > 240
    assert all(1 <= after - before <= 8 for before, after in pairwise(cuts))
    assert 300 - cuts[0] >= 60 - 8


def test_how_often_and_how_much_is_cut_follows_the_recipe() -> None:
    recipe = dataclasses.replace(RECIPE, fragment_share=0.6, fragment_cuts=8)
    counts = [len(draw_cuts(10**6, None, recipe, random.Random(seed))) for seed in range(2000)]
    assert 0.55 < sum(count > 0 for count in counts) / len(counts) < 0.65
    assert max(counts) == 8
    assert sum(count == 1 for count in counts) > sum(count == 4 for count in counts)


@given(st.text(), st.sets(st.integers(0, 50)))
def test_fragments_join_to_the_text(text: str, cuts: set[int]) -> None:
    inside = sorted(cut for cut in cuts if 0 < cut < len(text))
    fragments = split_at(text, inside)
    assert "".join(fragments) == text
    assert all(fragments)
    assert len(fragments) == len(inside) + (text != "")


@st.composite
def tokenisations(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Draw token lengths of a text tokenised whole, and of its fragments."""
    length = draw(st.integers(1, 30))

    def split(size: int) -> list[int]:
        ends = draw(st.sets(st.integers(1, size)))
        bounds = sorted({0, size, *ends})
        return [after - before for before, after in pairwise(bounds)]

    return split(length), [split(size) for size in split(length)]


def naive(whole: list[int], fragments: list[list[int]]) -> list[bool]:
    """Find, byte by byte, what is inside a token that a cut breaks, and before that cut."""
    owner = [number for number, length in enumerate(whole) for _ in range(length)]
    broken = [False] * len(owner)
    cut = 0
    for fragment in fragments[:-1]:
        start, cut = cut, cut + sum(fragment)
        if owner[cut - 1] == owner[cut]:
            for at in range(start, cut):
                broken[at] |= owner[at] == owner[cut]
    marks, at = [], 0
    for length in (each for fragment in fragments for each in fragment):
        marks.append(any(broken[at : at + length]))
        at += length
    return marks


@given(tokenisations())
def test_broken_tokens_are_those_of_a_naive_reference(
    lengths: tuple[list[int], list[list[int]]],
) -> None:
    whole, fragments = lengths
    assert broken_token_mask(whole, fragments) == naive(whole, fragments)


def test_half_a_word_before_a_cut_is_broken_and_the_rest_is_not() -> None:
    # "x = return" as "x", " =", " return"; cut inside "return": "x", " =", " ret" | "urn"
    assert broken_token_mask([1, 2, 7], [[1, 2, 4], [3]]) == [False, False, True, False]


def test_a_token_across_the_last_boundary_before_a_cut_is_broken() -> None:
    # line break and indent, then "self"; the cut inside "self" joins it all: "\n   s" | "elf"
    assert broken_token_mask([4, 4], [[5], [3]]) == [True, False]


def test_a_cut_between_two_tokens_breaks_none() -> None:
    assert broken_token_mask([1, 2, 7], [[1, 2], [7]]) == [False, False, False]


def test_text_without_cuts_has_no_broken_tokens() -> None:
    assert broken_token_mask([3, 4], [[3, 4]]) == [False, False]
    assert broken_token_mask([], []) == []
