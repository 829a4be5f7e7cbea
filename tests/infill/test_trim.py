"""Trimming: completions end where the suffix, the line or the block says, also as they arrive."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.trim import (
    BlockScanner,
    FirstLineScanner,
    IndentScanner,
    Trimmer,
    first_line,
    missing_closers,
)


def block(completion: str, prefix: str) -> str:
    scanner = BlockScanner(prefix)
    return scanner.push(completion) + scanner.finish()


def trim(completion: str, prefix: str, suffix: str, **options) -> str:
    trimmer = Trimmer(prefix, suffix, **options)
    return trimmer.push(completion) + trimmer.finish()


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


COLUMNS = st.text(" \t", max_size=5)
CODE = st.lists(
    st.sampled_from(
        ["else", "elsewhere", "case", "}", ")", "x", " ", "\n", "\n  ", "\n    ", "\r\n"]
    ),
    max_size=14,
).map("".join)


def block_of_lines(completion: str, prefix: str) -> str:
    """The definition, by whole lines."""

    def indent(line: str) -> int:
        return len(line[: len(line) - len(line.lstrip(" \t"))].expandtabs())

    base, deeper = indent(prefix.split("\n")[-1]), False
    lines = re.split(r"(?<=\n)", completion)
    for number, line in enumerate(lines[1:], 1):
        if not line.strip():
            continue
        here, text = indent(line), line.strip()
        closes = text[0] in ")]}"
        continues = re.match(r"(else|elif|except|finally|catch|case|default)\b", text)
        if here < base or (here == base and deeper and not (closes or continues)):
            return "".join(lines[:number]).rstrip()
        if here == base and deeper and closes:
            return "".join(lines[: number + 1]).rstrip()
        deeper = deeper or here > base
    return completion


@settings(deadline=None, max_examples=200)
@given(CODE, COLUMNS, st.data())
def test_a_block_in_pieces_is_the_block_of_the_whole(completion, blanks, data) -> None:
    expected = block_of_lines(completion, f"x\n{blanks}")
    assert in_pieces(BlockScanner(f"x\n{blanks}"), completion, data) == expected


@given(st.text("ab\r\n", max_size=8), st.data())
def test_a_first_line_in_pieces_is_the_first_line_of_the_whole(completion, data) -> None:
    assert in_pieces(FirstLineScanner(), completion, data) == first_line(completion)


def in_pieces(scanner, completion: str, data) -> str:
    places = data.draw(st.sets(st.integers(0, len(completion)), max_size=6))
    bounds = sorted({0, len(completion)} | places)
    shown = [scanner.push(completion[a:b]) for a, b in itertools.pairwise(bounds)]
    return "".join(shown) + scanner.finish()


def test_a_block_holds_back_blanks_and_words_that_may_continue_it() -> None:
    scanner = BlockScanner("    if x:")
    pieces = ["\n        a", "\n", "    el", "se:", " b", "\n    else", "where"]
    shown = [scanner.push(piece) for piece in pieces]
    assert shown == ["\n        a", "", "", "\n    else:", " b", "", ""]
    assert scanner.done


@pytest.mark.parametrize(
    ("completion", "kept"),
    [
        ("x\n    y\nz", "x\n    y"),
        ("x\n    y\n\n    z", "x\n    y\n\n    z"),
        ("x\n   y", "x"),
        ("x\r\n  y", "x"),
        ("x\r  y", "x\r  y"),
        ("x\n\t\t\t\ty", "x\n\t\t\t\ty"),
        ("x  y\n", "x  y\n"),
        ("\n\nz", ""),
    ],
)
def test_lines_with_too_little_indentation_end_a_completion(completion: str, kept: str) -> None:
    assert trim(completion, "    ", "", min_indent=4) == kept
    assert trim(completion, "    ", "") == completion


@given(st.text("ab \t\r\n", max_size=12), st.integers(1, 4), st.data())
def test_indentation_in_pieces_is_that_of_the_whole(completion, least, data) -> None:
    whole = IndentScanner(least)
    expected = whole.push(completion) + whole.finish()
    assert in_pieces(IndentScanner(least), completion, data) == expected
    assert completion.startswith(expected)


def test_a_completion_ends_at_its_next_line_break_when_told() -> None:
    trimmer = Trimmer("", "")
    shown = trimmer.push("a\nb")
    trimmer.end_at_line_break()
    assert not trimmer.ended_at_line_break
    shown += trimmer.push("c")
    assert not trimmer.cut
    shown += trimmer.push("d\ne\nf")
    assert shown == "a\nbcd"
    assert trimmer.cut
    assert trimmer.ended_at_line_break


def test_a_completion_without_a_further_line_break_ends_by_itself() -> None:
    trimmer = Trimmer("", "")
    trimmer.end_at_line_break()
    assert trimmer.push("ab") + trimmer.finish() == "ab"
    assert not trimmer.cut


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
    assert completion + missing_closers(completion, suffix) == closed


@settings(deadline=None)
@given(st.text("ab([{", max_size=20))
def test_closing_closes_everything_the_completion_opened(completion: str) -> None:
    closed = completion + missing_closers(completion, "")
    assert missing_closers(closed, "") == ""


def test_modes_combine() -> None:
    completion = "sum(values)\nprint(total)\n"
    assert trim(completion, "total = ", "\nprint(total)\n", overlap=True) == "sum(values)"
    assert trim(completion, "total = ", "\nprint(total)\n") == completion
    assert trim(completion, "total = ", "", lines="single") == "sum(values)"
    assert trim("sum([1, 2", "total = ", "", brackets="close") == "sum([1, 2])"
    assert trim("sum([1, 2", "total = ", "") == "sum([1, 2"
    assert trim("sum([1, 2)", "x = ", ")", overlap=True, brackets="close") == "sum([1, 2]"


def test_the_last_line_of_a_block_is_complete() -> None:
    # So it is not the beginning of the suffix's line, even if the answer was broken off later.
    trimmer = Trimmer("  x = 1\n  ", "\n  y = 12\n", lines="block", overlap=True)
    assert trimmer.push("x = 2\n  y = 1\nz") == "x = 2\n  y = 1"
    assert trimmer.done


def test_a_trimmer_tells_what_it_kept() -> None:
    trimmer = Trimmer("f(", ")\n", overlap=True, brackets="close")
    assert trimmer.push("[x)") + trimmer.finish() == "[x]"
    assert (trimmer.kept, trimmer.cut, trimmer.overlapped) == (2, True, True)
    trimmer = Trimmer("f(", ")\n", lines="single")
    assert trimmer.push("x") + trimmer.finish() == "x"
    assert (trimmer.kept, trimmer.cut, trimmer.overlapped) == (1, False, False)
