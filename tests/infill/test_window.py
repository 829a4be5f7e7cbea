"""Windows: how much of a long document is shown, and where its edges are placed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.errors import InvalidRequestError
from midfill.infill.cut_places import divides_character
from midfill.infill.window import WindowRule, place_end, place_start

RULE = WindowRule(before=400, after=150)
BLOCKS = "".join(
    f"def function_{n}(x, y):\n    total = x * {n} + y\n\n    return total\n\n\n"
    for n in range(200)
)
MINIFIED = "".join(f"f{n}=(a,b)=>a*{n}+b;" for n in range(12_000))


def first_line(start: int, text: str = BLOCKS) -> str:
    return text[start : text.find("\n", start)]


class TestStarts:
    def test_a_short_text_is_shown_whole(self) -> None:
        assert RULE.place(BLOCKS, RULE.whole)[0] == 0

    def test_a_window_begins_with_a_block_about_as_far_back_as_asked(self) -> None:
        for caret in range(2000, 6000, 37):
            start = place_start(BLOCKS, caret, RULE)
            assert first_line(start).startswith("def ")
            assert 0.75 * RULE.before <= caret - start <= 1.25 * RULE.before

    def test_a_line_that_closes_a_block_does_not_begin_one(self) -> None:
        text = ("  f(x);\n  g(x);\n};\n" + "  h(x);\n" * 20) * 40
        assert first_line(place_start(text, 3000, RULE), text).startswith("  ")


class TestLongLines:
    def test_a_window_in_a_long_line_begins_and_ends_after_a_separator(self) -> None:
        for caret in range(50_000, 50_200, 7):
            start = place_start(MINIFIED, caret, RULE)
            end = place_end(MINIFIED, caret, RULE, len(MINIFIED))
            assert 0.75 * RULE.before <= caret - start <= 1.25 * RULE.before
            assert RULE.after / 2 <= end - caret <= RULE.after
            for edge in (start, end):
                assert MINIFIED[edge - 1] in ";,()"

    def test_without_any_separator_no_character_is_divided(self) -> None:
        text = "e\u0301" * 5000
        for caret in range(4000, 4004):
            assert not divides_character(text, place_start(text, caret, RULE))
            assert not divides_character(text, place_end(text, caret, RULE, len(text)))


class TestEnds:
    def test_the_suffix_ends_with_its_last_whole_line(self) -> None:
        for caret in range(3000, 3100):
            end = place_end(BLOCKS, caret, RULE, len(BLOCKS))
            assert BLOCKS[end - 1] == "\n"
            assert RULE.after / 2 < end - caret <= RULE.after
            assert "\n" not in BLOCKS[end : caret + RULE.after]

    def test_a_short_suffix_is_shown_whole(self) -> None:
        assert place_end(BLOCKS, len(BLOCKS) - 150, RULE, len(BLOCKS)) == len(BLOCKS)

    def test_no_suffix_at_all_can_be_asked_for(self) -> None:
        assert place_end(BLOCKS, 3000, WindowRule(before=400, after=0), len(BLOCKS)) == 3000

    def test_it_ends_at_the_same_place_wherever_the_window_starts(self) -> None:
        longer = "x = 1\n" * 50 + BLOCKS
        end = place_end(BLOCKS, 3000, RULE, len(BLOCKS))
        assert place_end(longer, 3300, RULE, len(longer)) == end + 300


class TestRule:
    @pytest.mark.parametrize("numbers", [(0, 5), (-1, 5), (5, -1)])
    def test_a_nonsense_rule_names_its_field(self, numbers: tuple[int, int]) -> None:
        with pytest.raises(InvalidRequestError, match=r"window\.(before|after) must be at least"):
            WindowRule(*numbers)

    def test_the_text_after_the_caret_shrinks_first_to_a_quarter(self) -> None:
        for rule, smaller in [
            (WindowRule(600, 200), WindowRule(450, 150)),
            (WindowRule(600, 600), WindowRule(450, 150)),
            (WindowRule(1_000_000, 100), WindowRule(500, 100)),
            (WindowRule(100, 4000), WindowRule(100, 500)),
            (WindowRule(200, 40), WindowRule(200, 40)),
        ]:
            assert rule.limited(1000) == smaller

    def test_a_rule_limited_to_nothing_still_shows_a_character(self) -> None:
        assert RULE.limited(0) == WindowRule(before=1, after=0)


characters = st.text(st.sampled_from("ab \n\r\t;é\u0301🙂\u200d"), max_size=300)
texts = st.builds(lambda part, times: part * times, characters, st.integers(1, 12))


@settings(max_examples=300, deadline=None)
@given(texts, st.data())
def test_any_window_is_within_its_limits_and_divides_no_character(text, data) -> None:
    caret = data.draw(st.integers(0, len(text)))
    rule = WindowRule(data.draw(st.integers(1, 400)), data.draw(st.integers(0, 200)))
    start, end = rule.place(text, caret)
    assert 0 <= start <= caret <= end <= len(text)
    assert caret - start <= max(1.25 * rule.before, rule.before + 300)
    assert end - caret <= rule.after
    assert not divides_character(text, start)
    if not divides_character(text, caret):
        assert end == caret or not divides_character(text, end)
