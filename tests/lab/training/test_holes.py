"""Holes are inside their document and of the form of their kind."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.infill.planner import opened_line_break
from midfill.infill.prefix_cut import CutHistory
from midfill_lab.training.holes import Hole, draw_hole
from midfill_lab.training.recipe import DataRecipe

TEXTS = st.text(st.sampled_from("ab  \t\n\n(é漢😀"), max_size=300)
SEEDS = st.integers(0, 10**6)
RECIPE = DataRecipe(prefix_characters=(2, 40), suffix_characters=(1, 30), long_characters=90)


def only(**fields: object) -> DataRecipe:
    """Return a recipe with one kind of hole or layout."""
    none = dict.fromkeys(("line", "block", "span"), 0.0)
    return dataclasses.replace(RECIPE, **(none | fields))  # type: ignore[arg-type]


def draw(text: str, recipe: DataRecipe, seed: int) -> Hole | None:
    return draw_hole(text, recipe, random.Random(seed))


@given(TEXTS, SEEDS)
def test_bounds_always_hold(text: str, seed: int) -> None:
    hole = draw(text, RECIPE, seed)
    if hole is not None:
        assert 0 <= hole.start <= hole.caret < hole.end <= hole.stop <= len(text)
        assert 0 <= hole.cut <= hole.caret - hole.start
        assert text[hole.caret : hole.end].strip()


@given(TEXTS, SEEDS)
def test_the_context_is_whole_lines(text: str, seed: int) -> None:
    hole = draw(text, dataclasses.replace(RECIPE, empty_suffix=0.0), seed)
    if hole is not None:
        assert hole.start == 0 or text[hole.start - 1] == "\n"
        assert hole.stop == len(text) or text[hole.stop] == "\n"


@given(TEXTS, SEEDS)
def test_a_line_hole_reaches_to_the_end_of_its_line(text: str, seed: int) -> None:
    hole = draw(text, only(line=1.0), seed)
    if hole is not None:
        assert hole.kind == "line"
        assert "\n" not in text[hole.caret : hole.end]
        assert hole.end == len(text) or text[hole.end] == "\n"


@given(TEXTS, SEEDS, st.integers(1, 5))
def test_a_block_may_start_after_its_indentation_and_end_before_a_line_break(
    text: str, seed: int, lines: int
) -> None:
    hole = draw(text, only(block=1.0, block_lines=lines, whole_lines=0.0), seed)
    if hole is not None:
        assert hole.kind == "block"
        assert not text[: hole.caret].rpartition("\n")[2].strip()
        assert not text[hole.caret].isspace() or text[hole.caret] == "\n"
        assert hole.end == len(text) or text[hole.end] == "\n"
        assert text[hole.caret : hole.end].count("\n") < lines


@given(TEXTS, SEEDS, st.integers(1, 5))
def test_a_block_of_whole_lines_starts_and_ends_where_lines_start(
    text: str, seed: int, lines: int
) -> None:
    hole = draw(text, only(block=1.0, block_lines=lines, whole_lines=1.0), seed)
    if hole is not None:
        assert hole.caret == 0 or text[hole.caret - 1] == "\n"
        assert hole.end == len(text) or text[hole.end - 1] == "\n"
        assert len(text[hole.caret : hole.end].removesuffix("\n").split("\n")) <= lines


@given(TEXTS, SEEDS)
def test_line_starts_are_shown_as_the_server_shows_them(text: str, seed: int) -> None:
    recipe = only(block=1.0, nothing=1.0, whole_lines=1.0)
    sent = draw(text, recipe, seed)
    shown = draw(text, dataclasses.replace(recipe, opened_lines=True), seed)
    if sent is None or shown is None:
        assert sent is shown
        return
    prefix, suffix = text[sent.start : sent.caret], text[sent.end : sent.stop]
    needed = sent.kind == "nothing" or text[sent.caret : sent.end].endswith("\n")
    line_break = opened_line_break(prefix, suffix) if needed else ""
    assert shown.line_break + text[shown.end : shown.stop] == line_break + suffix
    missing = text[shown.caret : shown.end]
    assert text[sent.caret : sent.end] == (missing + line_break if missing else "")


@given(TEXTS, SEEDS, st.integers(1, 20))
def test_a_span_hole_is_not_longer_than_the_maximum(text: str, seed: int, longest: int) -> None:
    hole = draw(text, only(span=1.0, span_characters=longest), seed)
    if hole is not None:
        assert hole.kind == "span"
        assert hole.end - hole.caret <= longest


@pytest.mark.parametrize("layout", ["psm", "spm", "efim", "planned"])
def test_the_layout_determines_the_cut(layout: str) -> None:
    text = "some words in a line\n" * 40
    none = {"psm": 0.0, "spm": 0.0, "efim": 0.0, "planned": 0.0}
    recipe = dataclasses.replace(RECIPE, increment_characters=(400, 400), **(none | {layout: 1.0}))
    holes = [hole for seed in range(300) if (hole := draw(text, recipe, seed)) is not None]
    lengths = [hole.caret - hole.start for hole in holes]
    cuts = [hole.cut for hole in holes]
    assert {hole.layout for hole in holes} == {layout}
    if layout == "psm":
        assert cuts == lengths
    elif layout == "spm":
        assert not any(cuts)
    elif layout == "planned":
        prefixes = [text[hole.start : hole.caret] for hole in holes]
        layouts = [CutHistory().choose_and_record(prefix, "suffix") for prefix in prefixes]
        assert cuts == [len(planned.head) for planned in layouts]
    else:
        shares = [cut / length for cut, length in zip(cuts, lengths, strict=True) if length > 9]
        assert 0.4 < sum(shares) / len(shares) < 0.6


def test_carets_where_nothing_is_missing_are_at_the_ends_of_lines() -> None:
    text = "some words in a line\n" * 40
    recipe = dataclasses.replace(RECIPE, line=1e-9, block=0.0, span=0.0, nothing=1.0)
    holes = [hole for seed in range(100) if (hole := draw(text, recipe, seed)) is not None]
    assert len(holes) == 100
    assert {hole.kind for hole in holes} == {"nothing"}
    assert all(hole.caret == hole.end for hole in holes)
    assert {hole.caret % 21 for hole in holes} == {0, 20}


def test_planned_increments_are_as_long_as_the_recipe_says() -> None:
    text = "some words in a line\n" * 400
    recipe = dataclasses.replace(
        RECIPE,
        psm=0.0,
        spm=0.0,
        efim=0.0,
        planned=1.0,
        increment_characters=(100, 300),
        prefix_characters=(1000, 2000),
    )
    holes = [hole for seed in range(300) if (hole := draw(text, recipe, seed)) is not None]
    # Near the document's start, the whole prefix is shorter than that.
    increments = [hole.caret - hole.start - hole.cut for hole in holes if hole.cut]
    assert min(increments) >= 100
    assert 300 < max(increments) < 300 + 2 * 21


def test_the_mix_follows_the_recipe() -> None:
    text = "some words in a line\n" * 40
    holes = [hole for seed in range(2000) if (hole := draw(text, RECIPE, seed)) is not None]
    for name in ("line", "block", "span"):
        share = sum(hole.kind == name for hole in holes) / len(holes)
        assert share == pytest.approx(getattr(RECIPE, name), abs=0.06)
    for name in ("psm", "spm", "efim", "planned"):
        share = sum(hole.layout == name for hole in holes) / len(holes)
        assert share == pytest.approx(getattr(RECIPE, name), abs=0.06)
    at_the_end = sum(hole.stop == hole.end for hole in holes) / len(holes)
    assert at_the_end > RECIPE.empty_suffix / 2


@pytest.mark.parametrize("text", ["", "\n", "   \n\t\n"])
def test_blank_text_has_no_hole(text: str) -> None:
    assert all(draw(text, RECIPE, seed) is None for seed in range(50))


def test_the_same_seed_draws_the_same_hole() -> None:
    text = "some words in a line\n" * 40
    assert [draw(text, RECIPE, seed) for seed in range(20)] == [
        draw(text, RECIPE, seed) for seed in range(20)
    ]
