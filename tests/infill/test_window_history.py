"""Histories of windows: edges stay where they were while they serve the caret."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.view import View
from midfill.infill.window import ShownText, WindowHistory, WindowRule

RULE = WindowRule(before=400, after=150)
BLOCKS = "".join(
    f"def function_{n}(x, y):\n    total = x * {n} + y\n\n    return total\n\n\n"
    for n in range(200)
)
MINIFIED = "".join(f"f{n}=(a,b)=>a*{n}+b;" for n in range(12_000))


class Editor:
    """A whole document that is sent with every change, and its windows."""

    def __init__(self, text: str, caret: int, rule: WindowRule = RULE) -> None:
        self.text, self.caret, self.rule = text, caret, rule
        self.windows = WindowHistory()
        self.ask()

    @property
    def view(self) -> View:
        return View.of(self.text[: self.caret], self.text[self.caret :])

    def ask(self, limit: int | None = None) -> None:
        shown = self.windows.choose_and_record(self.view, self.rule, limit)
        assert self.text[: self.caret].endswith(shown.prefix)
        assert self.text[self.caret :].startswith(shown.suffix)
        self.shown, self.kept = shown, shown.same_start
        self.before, self.after = len(shown.prefix), len(shown.suffix)
        self.start = self.caret - self.before

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


class TestStarts:
    def test_typing_keeps_the_start_until_three_times_as_much_is_shown(self) -> None:
        editor = Editor(BLOCKS, 5000)
        first = editor.first_line
        while editor.before < 3 * RULE.before - 3:
            editor.type("x=1")
            assert (editor.first_line, editor.kept) == (first, True)
        editor.type("x=1")
        assert not editor.kept
        assert editor.before <= 1.25 * RULE.before

    def test_a_caret_that_moves_finds_at_most_twice_as_much(self) -> None:
        editor = Editor(BLOCKS, 5000)
        while editor.before < 2 * RULE.before + 30:
            editor.type("x=1")
        editor.go(editor.caret + 20)
        assert not editor.kept

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
        windows = WindowHistory()
        windows.choose_and_record(View.of(BLOCKS[:4000], BLOCKS[4000:]), RULE)
        sliding = replace(View.of(BLOCKS[:4100], BLOCKS[4100:]), left=3590, sent_left=3590)
        shown = windows.choose_and_record(sliding, RULE)
        assert len(shown.prefix) <= 4100 - 3590

    def test_a_window_smaller_than_the_rule_is_left_alone(self) -> None:
        windows = WindowHistory()
        for caret in (4000, 4040, 4100):
            view = View.of(BLOCKS[:caret], BLOCKS[caret : caret + 200])
            view = replace(view, left=3650, sent_left=caret - 300, right=caret + 120)
            view = replace(view, sent_right=caret + 100)
            shown = windows.choose_and_record(view, RULE)
            assert (shown.prefix, shown.suffix) == (view.prefix, view.suffix)

    def test_a_start_in_a_long_line_stays_while_the_caret_is_near(self) -> None:
        editor = Editor(MINIFIED, 100_000)
        start = editor.start
        for _ in range(40):
            editor.type("a+b;")
            assert (editor.start, editor.kept) == (start, True)

    def test_the_memory_is_bounded(self) -> None:
        editor = Editor(BLOCKS, 1000)
        for caret in range(1000, 9000, 400):
            editor.go(caret)
        assert len(editor.windows) == 8
        assert sum(map(len, editor.windows.texts())) <= 8 * 65 + RULE.after

    def test_a_limit_holds_for_later_requests(self) -> None:
        editor = Editor(BLOCKS, 5000)
        editor.ask(limit=300)
        for _ in range(200):
            editor.type("x = 1\n")
            assert editor.before + editor.after <= 300

    def test_a_limited_window_moves_in_hops_too(self) -> None:
        editor, hops = Editor(BLOCKS, 5000), 0
        editor.ask(limit=300)
        for _ in range(100):
            editor.type("x = 1\n")
            hops += not editor.kept
        assert hops <= 12


class TestExpectedHops:
    def fill(self, editor: Editor) -> ShownText:
        """Type until a hop is worth preparing; return what it will show."""
        while (expected := editor.windows.expected(editor.view)) is None:
            assert editor.before <= 0.8 * 2 * RULE.before
            editor.type("x = 1\n")
            assert editor.kept
        return expected

    def test_a_hop_that_was_prepared_is_made_with_the_next_request(self) -> None:
        editor = Editor(BLOCKS, 5000)
        expected = self.fill(editor)
        assert len(expected.prefix) <= RULE.whole
        assert expected.suffix == editor.shown.suffix
        editor.windows.record_computed(editor.view, expected.prefix)
        assert editor.windows.expected(editor.view) is None
        editor.type("y")
        assert editor.shown.prefix == expected.prefix + "y"

    def test_a_hop_that_was_not_prepared_comes_when_it_must(self) -> None:
        editor = Editor(BLOCKS, 5000)
        self.fill(editor)
        start = editor.start
        editor.type("y")
        assert editor.start == start

    def test_nothing_is_prepared_for_a_document_that_is_shown_whole(self) -> None:
        editor = Editor(BLOCKS[: RULE.whole], RULE.whole)
        assert editor.windows.expected(editor.view) is None

    def test_nothing_is_prepared_where_a_limit_leaves_no_better_start(self) -> None:
        editor = Editor(BLOCKS, 5000)
        editor.ask(limit=40)
        for _ in range(50):
            expected = editor.windows.expected(editor.view)
            assert expected is None or len(expected.prefix) < editor.before
            editor.type("x")


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
def test_through_any_edits_a_window_holds_between_half_and_three_times_the_rule(
    steps, text
) -> None:
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
        assert editor.before <= 3 * RULE.before
        assert editor.start == 0 or editor.before >= RULE.before / 2
