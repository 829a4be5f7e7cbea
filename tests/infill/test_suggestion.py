"""What of an answer is shown to somebody who didn't ask for it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from midfill.infill.suggestion import (
    leaves_bracket_open,
    leaves_string_open,
    repeats_line_above,
    suggestion,
    takes_closing_bracket,
    without_loop,
)


@pytest.mark.parametrize(
    ("text", "suffix", "is_open"),
    [
        ("foo(", "\n}\n", True),
        ("foo(", ")\n", False),
        ("foo([1, 2", "])", False),
        ("foo([1, 2", ")", True),
        ("if (x) {", "\n    y();\n}", False),
        ("if (x) {", "\n", False),  # a block may be closed anywhere
        ("call(function () {", "\n  x();\n})", False),
        ("items = [", "\n    f(1),\n    g(2),\n]\n", False),
        ("items = [", "\n\ndef f():\n    return []\n", True),
        ("a)", "", False),
    ],
)
def test_a_bracket_is_open_unless_what_follows_closes_it(
    text: str, suffix: str, is_open: bool
) -> None:
    assert leaves_bracket_open(text, suffix) is is_open


@pytest.mark.parametrize(
    ("text", "suffix", "is_open"),
    [
        ('print("hello', "", True),
        ('print("hello', '")', False),
        ('print("hello")', "", False),
        ('print("say \\"', "", True),
        ("x = 'abc", "\n", True),
        ("# it doesn't", "\n", False),
        ("fn f<'a>(x: &'a str)", "\n", False),
        ('"""Return', "\n", False),
        ('a = "x\nb = 1', "\n", False),
    ],
)
def test_a_string_is_open_unless_its_line_closes_it(text: str, suffix: str, is_open: bool) -> None:
    assert leaves_string_open(text, suffix) is is_open


@pytest.mark.parametrize(
    ("line", "text", "suffix", "is_taken"),
    [
        ("if (", "is_empty(ring", ")\n    return;", True),
        ("if (", "is_empty(ring)", ")\n    return;", False),
        ("if (", "is_empty(ring", "))\n    return;", False),
        ("f(g[", "h[1", "])", True),
        ("f(g[", "h[1]", "])", False),
        ("run(() => ", "{", "\n});", False),
        ("run(() => ", "{", ");", True),
        ("f(a, ", "b).g(c", ")", False),  # closes one, opens one
        ("f(", "g(", "", False),  # nothing was closed before: see leaves_bracket_open
        ("x = ", "g(", ")", False),
    ],
)
def test_an_answer_must_not_need_the_bracket_that_its_line_needs(
    line: str, text: str, suffix: str, is_taken: bool
) -> None:
    assert takes_closing_bracket(text, line, suffix) is is_taken


@pytest.mark.parametrize(
    ("prefix", "suffix", "shown"),
    [
        ("    return ", "\n", "a + b"),
        ("    return ", "", "a + b"),
        ("    return ", " * 2\n", "a + b\n\n"),
        ("def f(a, b):\n", "c = 1\n", "a + b\n\n"),  # whole lines keep their ends
    ],
)
def test_blank_lines_after_the_carets_line_are_not_shown(
    prefix: str, suffix: str, shown: str
) -> None:
    assert suggestion("a + b\n\n", prefix, suffix) == shown


def test_an_answer_that_takes_its_lines_bracket_is_not_shown() -> None:
    assert suggestion("is_empty(ring", "    if (", ")\n        return;\n") == ""


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a, b, c, d", "a, b, c, d"),
        (' " ").replace(" ", " ").replace(" ", " ").replace(" ",', ' " ").replace(" ",'),
        ("x.y.y.y.y.y.y.y", "x.y"),
        ("----------------", "-"),
        ("aaa", "aaa"),
        ("foo()\n" * 3, "foo()\n"),
    ],
)
def test_a_loop_ends_with_its_first_period(text: str, kept: str) -> None:
    assert without_loop(text) == kept


@given(st.text(alphabet="ab(", max_size=12), st.text("abc", min_size=3, max_size=6))
def test_what_is_left_of_a_loop_is_a_beginning_and_no_loop(head: str, period: str) -> None:
    text = head + period * 6
    kept = without_loop(text)
    assert text.startswith(kept)
    assert len(kept) <= len(head) + 2 * len(period)


def test_only_the_same_line_with_the_same_indentation_repeats_the_line_above() -> None:
    assert repeats_line_above("tal += 1", "    total += 1\n    to")
    assert not repeats_line_above("}", "    }\n")
    assert not repeats_line_above("tal += 2", "    total += 1\n    to")
    assert not repeats_line_above("tal += 1\n    x", "    total += 1\n    to")


@pytest.mark.parametrize("broken_off", [False, True])
def test_a_complete_answer_is_shown_as_it_is(broken_off: bool) -> None:
    text = "x = f(1)\n    y = 2"
    shown = suggestion(text, "def g():\n    ", "\n", broken_off=broken_off)
    assert shown == ("x = f(1)" if broken_off else text)


def test_an_answer_is_cut_back_to_where_nothing_was_open() -> None:
    assert suggestion("x = f(1)\n    y = g(", "def h():\n    ", "\n\n") == "x = f(1)"
    assert suggestion('x = 1\nz = [\n    "a', "", "\nend") == "x = 1"


@pytest.mark.parametrize(
    ("answer", "prefix", "suffix"),
    [
        ("anything", "", ""),
        ("anything", " \n", "\n\n"),
        ("  \n ", "x = 1\n", ""),
        ("foo(", "    ", "\n}"),
        ("x = 1", "x = 1\n", "\ny = 2"),
    ],
)
def test_nothing_is_shown_where_nothing_is_worth_it(answer: str, prefix: str, suffix: str) -> None:
    assert suggestion(answer, prefix, suffix) == ""


def test_an_answer_within_one_line_that_was_broken_off_is_not_shown() -> None:
    assert suggestion("some very long li", "x = ", "\n", broken_off=True) == ""


@given(
    st.text("ab(\n\"'[", max_size=40), st.text("ab(\n", max_size=10), st.text(")\n]", max_size=6)
)
def test_what_is_shown_begins_the_answer(answer: str, prefix: str, suffix: str) -> None:
    assert answer.startswith(suggestion(answer, prefix, suffix))
