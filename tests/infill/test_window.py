"""Windows: how much of a long document is shown, and that their edges stay where they were."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.errors import InvalidRequestError
from midfill.infill.character_boundaries import divides_character
from midfill.infill.window import WindowRule, WindowStarts, place_end, place_start

RULE = WindowRule(before=400, after=150)
BLOCKS = "".join(
    f"def function_{n}(x, y):\n    total = x * {n} + y\n\n    return total\n\n\n"
    for n in range(200)
)
MINIFIED = "".join(f"f{n}=(a,b)=>a*{n}+b;" for n in range(12_000))


class Editor:
    """A whole document that is sent with every change, and the starts of its windows."""

    def __init__(self, text: str, caret: int, rule: WindowRule = RULE) -> None:
        self.text, self.caret, self.rule = text, caret, rule
        self._starts = WindowStarts()
        self.ask()

    def ask(self) -> None:
        self.start, self.kept = self._starts.choose_and_record(
            self.text, self.caret, self.rule, sent=0, shown=0
        )

    def replace(self, start: int, end: int, new: str) -> None:
        """Change the text; the caret stays between the same characters."""
        self.text = self.text[:start] + new + self.text[end:]
        if start < self.caret:
            self.caret = max(start, self.caret - end + start) + len(new)
        self.ask()

    def type(self, text: str) -> None:
        self.text = self.text[: self.caret] + text + self.text[self.caret :]
        self.caret += len(text)
        self.ask()

    def go(self, caret: int) -> None:
        self.caret = caret
        self.ask()

    @property
    def first_line(self) -> str:
        return self.text[self.start : self.text.find("\n", self.start)]

    @property
    def before(self) -> int:
        return self.caret - self.start


class TestStarts:
    def test_a_short_text_is_shown_whole(self) -> None:
        assert Editor(BLOCKS[:900], RULE.whole).start == 0

    def test_a_window_begins_with_a_block_about_as_far_back_as_asked(self) -> None:
        for caret in range(2000, 6000, 37):
            editor = Editor(BLOCKS, caret)
            assert editor.first_line.startswith("def ")
            assert 0.75 * RULE.before <= editor.before <= 1.25 * RULE.before

    def test_a_line_that_closes_a_block_does_not_begin_one(self) -> None:
        text = ("  f(x);\n  g(x);\n};\n" + "  h(x);\n" * 20) * 40
        editor = Editor(text, 3000)
        assert editor.first_line.startswith("  ")

    def test_typing_keeps_the_start_until_twice_as_much_is_shown(self) -> None:
        editor = Editor(BLOCKS, 5000)
        first = editor.first_line
        while editor.before < 2 * RULE.before - 3:
            editor.type("x=1")
            assert (editor.first_line, editor.kept) == (first, True)
        editor.type("x=1")
        assert not editor.kept
        assert editor.before <= 1.25 * RULE.before

    def test_moving_the_caret_keeps_the_start_while_half_as_much_is_shown(self) -> None:
        editor = Editor(BLOCKS, 5000)
        start = editor.start
        for caret in (5100, start + 200, start + 799, start + 300, start + 800):
            editor.go(caret)
            assert (editor.start, editor.kept) == (start, True)
        editor.go(start + 199)
        assert editor.start < start

    def test_edits_above_the_window_do_not_move_it(self) -> None:
        editor = Editor(BLOCKS, 5000)
        first = editor.first_line
        for place, new in ((0, "import os\n"), (700, ""), (4000, "# a comment\n")):
            editor.replace(place, place + 20, new)
            assert (editor.first_line, editor.kept) == (first, True)

    def test_edits_above_and_below_at_once_do_not_move_it(self) -> None:
        editor = Editor(BLOCKS, 5000)
        first = editor.first_line
        editor.text = "import os\n" + editor.text + "print(1)\n"
        editor.go(editor.caret + 10)
        assert (editor.first_line, editor.kept) == (first, True)

    def test_a_caret_that_comes_back_finds_its_start_again(self) -> None:
        editor = Editor(BLOCKS, 3000)
        starts = {}
        for caret in (3000, 5000, 8000):
            editor.go(caret)
            starts[caret] = editor.start
        editor.go(8500)
        for caret, start in starts.items():
            editor.go(caret + 60)
            assert (editor.start, editor.kept) == (start, False)

    def test_a_start_whose_line_has_changed_is_given_up(self) -> None:
        editor = Editor(BLOCKS, 5000)
        editor.replace(editor.start, editor.start + 5, "class ")
        assert not editor.kept

    def test_scrolling_through_a_document_moves_the_start_in_hops(self) -> None:
        editor = Editor(BLOCKS, 1000)
        hops = 0
        for caret in range(1000, 9000, 20):
            editor.go(caret)
            hops += not editor.kept
        assert hops <= 8000 / (0.75 * RULE.before)

    def test_a_text_that_repeats_itself_still_moves_in_hops(self) -> None:
        editor = Editor("    0,\n" * 2000, 3000)
        hops = 0
        for _ in range(300):
            editor.type("    0,\n")
            hops += not editor.kept
        assert hops <= 300 * 7 / (0.75 * RULE.before)

    def test_only_text_that_was_sent_or_is_shown_is_used(self) -> None:
        starts = WindowStarts()
        starts.choose_and_record(BLOCKS, 4000, RULE, sent=0, shown=0)
        start, _ = starts.choose_and_record(BLOCKS, 4100, RULE, sent=3590, shown=3590)
        assert start >= 3590

    def test_a_window_smaller_than_the_rule_is_left_alone(self) -> None:
        starts = WindowStarts()
        for caret in (4000, 4040, 4100):
            sent, shown = caret - 300, 3650
            start, _ = starts.choose_and_record(BLOCKS, caret, RULE, sent=sent, shown=shown)
            assert start == shown

    def test_the_memory_is_bounded(self) -> None:
        starts = WindowStarts()
        for caret in range(1000, 9000, 400):
            starts.choose_and_record(BLOCKS, caret, RULE, sent=0, shown=0)
        assert sum(map(len, starts.texts())) <= 8 * 65


class TestLongLines:
    def test_a_window_in_a_long_line_begins_and_ends_after_a_separator(self) -> None:
        for caret in range(50_000, 50_200, 7):
            start = place_start(MINIFIED, caret, RULE)
            end = place_end(MINIFIED, caret, RULE, len(MINIFIED))
            assert 0.75 * RULE.before <= caret - start <= 1.25 * RULE.before
            assert RULE.after / 2 <= end - caret <= RULE.after
            for edge in (start, end):
                assert MINIFIED[edge - 1] in ";,()"

    def test_it_stays_while_the_caret_is_near(self) -> None:
        editor = Editor(MINIFIED, 100_000)
        start = editor.start
        for _ in range(40):
            editor.type("a+b;")
            assert (editor.start, editor.kept) == (start, True)

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

    def test_a_limited_window_hops_before_it_is_longer(self) -> None:
        starts, rule = WindowStarts(), RULE.limited(500)
        text, caret = BLOCKS, 4000
        for _ in range(200):
            text, caret = text[:caret] + "x = 1\n" + text[caret:], caret + 6
            start, _ = starts.choose_and_record(
                text, caret, rule, sent=0, shown=0, most=500 - rule.after
            )
            assert caret - start <= 500 - rule.after


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


moves = st.lists(
    st.tuples(
        st.sampled_from(["type", "go", "above", "below", "far"]),
        st.integers(0, 2**16),
        st.text("ab\n (", max_size=12),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(moves, st.sampled_from([BLOCKS[:6000], MINIFIED[:6000], "    0,\n" * 800]))
def test_through_any_edits_a_window_holds_between_half_and_twice_the_rule(steps, text) -> None:
    editor = Editor(text, 3000)
    for kind, number, new in steps:
        if kind == "type":
            editor.type(new)
        elif kind == "go":
            editor.go(min(max(0, editor.caret + number % 400 - 200), len(editor.text)))
        elif kind == "far":
            editor.go(number % (len(editor.text) + 1))
        elif kind == "above":
            place = number % (editor.caret + 1)
            editor.replace(place, place, new)
        else:
            place = editor.caret + number % (len(editor.text) - editor.caret + 1)
            editor.replace(place, place, new)
        assert 0 <= editor.start <= editor.caret
        assert editor.before <= 2 * RULE.before
        assert editor.start == 0 or editor.before >= RULE.before / 2
