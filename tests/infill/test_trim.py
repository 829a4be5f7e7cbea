"""Trimming: completions end where the suffix, the line or the block says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.trim import block, first_line, trim, with_closed_brackets, without_overlap


@pytest.mark.parametrize(
    ("completion", "suffix", "kept"),
    [
        ("x)", ")", "x"),  # the suffix closes the call
        ("f(x)", ")", "f(x)"),  # this bracket is the completion's own
        ("f(x))", ")", "f(x)"),
        ('hello")', '")', "hello"),
        ("a, b", "\nreturn a", "a, b"),  # nothing repeated
        ("y = 1\n    return x", "\n    return x\n", "y = 1"),
        ("y = 1\n    return x\n\n\ndef g", "\n  return x\n\ndef g():\n", "y = 1"),  # blanks differ
        ("x,", ", y)", "x"),
        ("a + b", " + b", "a + b"),  # too short to be sure
        ("total + bonus", " + bonus", "total"),
        ("", ")", ""),
        ("abc", "", "abc"),
        ("return x", "return x", ""),
    ],
)
def test_a_completion_that_runs_into_the_suffix_is_cut(completion, suffix, kept) -> None:
    assert without_overlap(completion, suffix) == kept


@settings(deadline=None)
@given(st.text("ab()[]\n ,;é", max_size=30), st.text("ab()[]\n ,;é", max_size=30))
def test_only_text_that_the_suffix_has_is_ever_cut(completion: str, suffix: str) -> None:
    kept = without_overlap(completion, suffix)
    assert completion.startswith(kept)
    lost = "".join(completion[len(kept) :].split())
    assert "".join(suffix.split()).startswith(lost)


@settings(deadline=None)
@given(st.text("abcd \n", min_size=8, max_size=30), st.text("xyz", min_size=1, max_size=10))
def test_a_long_repetition_is_always_found(shared: str, new: str) -> None:
    if sum(not char.isspace() for char in shared) >= 3:
        assert without_overlap(new + shared, shared + "end") == (
            new if not shared[:1].isspace() else new.rstrip()
        )


def test_single_line_mode_keeps_the_first_line() -> None:
    assert first_line("a = 1\nb = 2") == "a = 1"
    assert first_line("a = 1\r\nb = 2") == "a = 1"
    assert first_line("a = 1") == "a = 1"
    assert first_line("\nb") == ""


@pytest.mark.parametrize(
    ("prefix", "completion", "kept"),
    [
        ("def f(x):", "\n    return x\n\ndef g():", "\n    return x"),
        ("def f(x):\n    ", "y = x\n    return y\n\ndef g():", "y = x\n    return y"),
        (
            "    if x:",
            "\n        a\n    else:\n        b\n    c",
            "\n        a\n    else:\n        b",
        ),
        ("void f() {", "\n  x();\n}\nvoid g() {", "\n  x();\n}"),
        ("a = 1\n", "b = 2\nc = 3\n", "b = 2\nc = 3\n"),  # no block to end
        ("\tif x {", "\n\t\ty()\n\t}\n\tz()", "\n\t\ty()\n\t}"),
        ("x = [", "1, 2]", "1, 2]"),
    ],
)
def test_block_mode_ends_with_the_enclosing_indent(prefix, completion, kept) -> None:
    assert block(completion, prefix) == kept


@pytest.mark.parametrize(
    ("completion", "suffix", "closed"),
    [
        ("f(x, [1", "", "f(x, [1])"),
        ("f(x, [1", ")", "f(x, [1]"),
        ("f(x, [1", " ]) ", "f(x, [1"),
        ("f(x)", "", "f(x)"),
        ("x)", "", "x)"),
        ("{(", "\n)\n}", "{("),
    ],
)
def test_brackets_are_closed_unless_the_suffix_does_it(completion, suffix, closed) -> None:
    assert with_closed_brackets(completion, suffix) == closed


@settings(deadline=None)
@given(st.text("ab([{", max_size=20))
def test_closing_closes_everything_the_completion_opened(completion: str) -> None:
    closed = with_closed_brackets(completion, "")
    assert closed.startswith(completion)
    assert with_closed_brackets(closed, "") == closed


def test_modes_combine() -> None:
    completion = "sum(values)\nprint(total)\n"
    assert trim(completion, "total = ", "\nprint(total)\n") == "sum(values)"
    assert trim(completion, "total = ", "", lines="single") == "sum(values)"
    assert trim("sum([1, 2", "total = ", "", brackets="close") == "sum([1, 2])"
    assert trim("sum([1, 2", "total = ", "") == "sum([1, 2"
