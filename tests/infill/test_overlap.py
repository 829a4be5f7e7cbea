"""OverlapScanner: a completion ends where it begins to repeat the suffix, also while it arrives."""

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midfill.infill.trim import OverlapScanner


def without_overlap(completion: str, prefix: str, suffix: str, *, broken_off: bool = False) -> str:
    """Return a completion up to where it begins to repeat the suffix; see ``OverlapScanner``."""
    scanner = OverlapScanner(prefix, suffix)
    return scanner.push(completion) + scanner.finish(broken_off=broken_off)


BODY = "def area(w, h):\n    "


@pytest.mark.parametrize(
    ("prefix", "completion", "suffix", "kept"),
    [
        # the rest of the caret's line
        ("f(", "x)", ")", "x"),  # the suffix closes the call
        ("f(", "g(x)", ")", "g(x)"),  # this bracket is the completion's own
        ("f(", "g(x))", ")", "g(x)"),
        ("f(g(", "x)", ")", "x)"),  # two calls are open, the suffix closes one
        ("f(g(", "x))", ")", "x)"),
        ('say("', 'hello")', '")', "hello"),
        ('say("', 'he" + "llo")', '")', 'he" + "llo'),
        ("f(", "x,", ", y)", "x"),
        ("f(", "x, y)", ", y)", "x"),
        ("(a, ", "b", ", c)", "b"),
        ("sum = ", "total + bonus", " + bonus\n", "total"),
        ("sum = ", "total + b", " + bonus\n", "total + b"),  # ends inside the suffix's word
        ("xs = ", "[1, 2", "]\n", "[1, 2"),
        ("if ", "x > 0:\n    y = 1", ":\n    y = 1\n", "x > 0"),
        ("f(", "a,\n  b)", ")", "a,\n  b"),
        # the lines after the caret's
        (BODY, "a = w * h\n    return a", "\n    return a\n", "a = w * h"),
        (BODY, "a = w * h\n    return a\n\n\nprint(", "\n    return a\n\nprint(a)\n", "a = w * h"),
        (BODY, "a = w * h\n\n    return a\n", "\n    return a\n", "a = w * h"),
        (BODY, "if w:\n        return a", "\n    return a\n", "if w:\n        return a"),
        (BODY, "return w", "\n    w = 3\n", "return w"),  # a word, not a line
        (BODY, "x = w\n    ret", "\n    return a\n", "x = w\n    ret"),
        ("import json\n", "import os\n", "\nimport os.path\n", "import os\n"),
        ("", "a\r\n  b\r\n", "\r\n  b\r\n", "a"),
        # the caret in the first column of the suffix's first line, or within its indentation
        (BODY[:-4], "    a = w\n    return a", "    return a\n", "    a = w\n"),
        (BODY, "a = w\n    return a", "return a\n", "a = w\n    "),
        (BODY[:-2], "  a = w\n    return a", "  return a\n", "  a = w\n  "),
        (BODY, "return a", "return a\n", ""),
        (BODY, "return a", "\n    return a\n", ""),  # the whole line is there already
        # lines that only look alike
        ("if a:\n", "    pass\nelif b:\n", "    pass\n", "    pass\nelif b:\n"),
        ("    x(\n        y,\n", "        )\n", "    )\n", "        )\n"),
        ("{\n  if (x) {\n    y();\n", "  }\n", "}\n", "  }\n"),
        ('{\n  "a": 1,\n', '  "b": 1,\n', '  "c": 1,\n', '  "b": 1,\n'),
        # nothing there
        ("f(", "", ")", ""),
        ("f(", "abc", "", "abc"),
        ("f(", "abc\n", " \n\n", "abc\n"),
        # blanks alone are nothing
        ("x = 1", "\n    ", "\ny = 2\n", ""),
        (BODY[:-4], "\n    return a", "    return a\n", ""),
    ],
)
def test_a_completion_ends_where_it_repeats_the_suffix(prefix, completion, suffix, kept) -> None:
    assert without_overlap(completion, prefix, suffix) == kept


def test_an_answer_that_was_broken_off_may_end_within_a_repeated_line() -> None:
    texts = ("x = w\n    ret", BODY, "\n    return a\n")
    assert without_overlap(*texts, broken_off=True) == "x = w"
    assert without_overlap(*texts) == texts[0]
    whole = ("import os\n", "import json\n", "\nimport os.path\n")
    assert without_overlap(*whole, broken_off=True) == whole[0]  # this line is complete
    assert without_overlap("\n    ", "x = 1", "", broken_off=True) == "\n    "


LINES = "\n    first = compute(alpha)\n    second = compute(beta)\n    third = compute(gamma)\n"


def test_three_repeated_lines_end_the_completion_whatever_follows() -> None:
    scanner = OverlapScanner("    zero = 0", LINES + "    fourth = 4\n")
    assert scanner.push(f" + 1{LINES}    fourth") == " + 1"
    assert scanner.done
    assert scanner.cut
    assert scanner.push(" = 5") + scanner.finish() == ""


def test_one_repeated_line_is_the_completions_own_if_it_goes_on_otherwise() -> None:
    completion = "zero = 0\n    first = compute(alpha)\n    other = 1"
    assert without_overlap(completion, "    ", LINES) == completion


def test_a_suffix_repeated_to_its_end_ends_the_completion() -> None:
    completion = "a = w * h\n    return area\n\n\ndef other():\n    pass\n"
    assert without_overlap(completion, BODY, "\n    return area\n") == "a = w * h"
    assert without_overlap("x: {},\n  y: {},\n", "{", "}\n") == "x: {},\n  y: {},\n"


def test_only_what_may_be_cut_is_held_back() -> None:
    scanner = OverlapScanner("    ", "\n    return total\n\nprint(f(1))\n")
    pieces = ["total = 1", "\n", "    ret", "ries", " = 2", "\n    return", " total", "\n"]
    shown = [scanner.push(piece) for piece in pieces]
    assert shown == ["total = 1", "", "", "\n    retries", " = 2", "", "", ""]
    assert scanner.push("    x") == "\n    return total\n    x"
    assert scanner.finish() == ""
    inline = OverlapScanner("f(", ", b)")
    assert [inline.push(piece) for piece in ("x", ", ", "c", ", b")] == ["x", "", ", c", ""]
    assert inline.finish() == ""


# --- text that people wrote ---


@pytest.fixture(scope="module")
def holes() -> list[tuple[str, str, str]]:
    """Prefix, hole and suffix: rests of lines, blocks, and whole lines, cut out of this project."""
    rng, drawn = random.Random(0), []
    for path in sorted((Path(__file__).parents[2] / "src" / "midfill").rglob("*.py")):
        text = path.read_text()
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        for kind in ("line", "block", "whole lines") * 2:
            first = rng.randrange(len(starts) - 1)
            last = min(len(starts) - 2, first + (rng.randrange(5) if kind != "line" else 0))
            start, end = starts[first], starts[last + 1] - 1
            code = start + len(text[start:end]) - len(text[start:end].lstrip())
            if code >= end:
                continue
            if kind == "whole lines":
                end += 1
            else:
                start = rng.randrange(code, starts[first + 1]) if kind == "line" else code
            if text[start:end].strip():
                drawn.append((text[:start], text[start:end], text[end:]))
    return drawn


def test_the_right_text_is_hardly_ever_cut(holes: list[tuple[str, str, str]]) -> None:
    cut = [hole for prefix, hole, suffix in holes if without_overlap(hole, prefix, suffix) != hole]
    assert len(cut) <= 0.005 * len(holes)


def test_the_right_text_is_found_where_it_runs_on(holes: list[tuple[str, str, str]]) -> None:
    lost = []
    for number, (prefix, hole, suffix) in enumerate(holes):
        line_ends = [place for place, char in enumerate(suffix[:500]) if char == "\n"]
        ends = [place for place in line_ends if suffix[:place].strip()]
        if ends:
            end = ends[min(number % 4, len(ends) - 1)]  # one to four lines of the suffix
            kept = without_overlap(hole + suffix[:end], prefix, suffix)
            if kept.rstrip() != hole.rstrip():
                lost.append((hole, kept))
    assert len(lost) <= 0.005 * len(holes)


# --- the definition, written down as slowly as possible ---

OPENERS = {")": "(", "]": "[", "}": "{"}


def visible(text: str, indent: str | None) -> list[tuple[str | None, str, int]]:
    """Characters that are not blank: indentation if first of their line, character, place."""
    found = []
    for place, char in enumerate(text):
        if char in "\r\n":
            indent = ""
        elif char.isspace():
            indent = None if indent is None else indent + char
        else:
            found.append((indent, char, place))
            indent = None
    return found


def unmatched(text: str, opened: str = "") -> tuple[str, bool]:
    foreign = False
    for char in text:
        if char in "([{":
            opened += char
        elif char in OPENERS:
            if opened[-1:] == OPENERS[char]:
                opened = opened[:-1]
            else:
                foreign = True
    return opened, foreign


def is_word(char: str) -> bool:
    return char == "_" or char.isalnum()


class Reference:
    """The end of a completion, by trying every length of the overlap."""

    def __init__(self, prefix: str, suffix: str) -> None:
        line = prefix.split("\n")[-1]
        self.prefix, self.suffix = prefix, suffix
        self.before = None if line.strip() else line
        self.coming = visible(suffix, self.before)
        self.leading = suffix[: len(suffix) - len(suffix.lstrip())]
        self.inline = bool(self.coming) and self.coming[0][0] is None

    def end(self, completion: str, broken_off: bool) -> int:
        end, cut = self.end_before_overlap(completion, broken_off)
        ends_blank = not completion[:end].strip() and (cut or not broken_off)
        return 0 if ends_blank else end

    def end_before_overlap(self, completion: str, broken_off: bool) -> tuple[int, bool]:
        written = visible(completion, self.before)
        for count in range(1, len(written) + 1):  # what is certain as soon as it is written
            for length in range(min(count, len(self.coming)), 0, -1):
                start = self.start(completion, written[:count], length)
                certain = length == 200 or self.certain_before(written, count, length)
                if start is not None and certain:
                    return start, True
        for length in range(min(len(written), len(self.coming)), 0, -1):
            start = self.start(completion, written, length)
            if start is not None and self.counts(completion, written, length, broken_off):
                return start, True
        return len(completion), False

    def start(self, completion: str, written: list, length: int) -> int | None:
        """Where the last symbols begin, with blanks, if they equal the suffix's first ones."""
        last, first = written[-length:], self.coming[:length]
        if last[-1][1] != first[-1][1] or [one[1] for one in last] != [one[1] for one in first]:
            return None
        skipped = 1 if self.inline else 0  # whose indentation doesn't matter
        if [one[0] for one in last[skipped:]] != [one[0] for one in first[skipped:]]:
            return None
        at = last[0][2]
        before = (self.prefix + completion[:at])[-1:]
        if self.inline and before == last[0][1] and not is_word(before) and before not in "()[]{}":
            return None
        if self.in_word(completion, at) and len(self.coming) < 8:
            return None
        if self.inline or "\n" in self.leading or "\r" in self.leading:
            return len(completion[:at].rstrip()) if self.leading else at
        return at - len(self.leading)

    def in_word(self, completion: str, at: int) -> bool:
        return self.inline and at > 0 and is_word(completion[at - 1]) and is_word(completion[at])

    def lines(self, length: int) -> int:
        """How many of the suffix's lines begin within its first symbols."""
        return 1 + sum(indent is not None for indent, _, _ in self.coming[1:length])

    def certain_before(self, written: list, count: int, length: int) -> bool:
        if count == len(written) or written[count][0] is None:
            return False
        if length == len(self.coming):
            return length >= 8
        same = self.coming[length][:2] == written[count][:2]
        return same and length >= 60 and self.lines(length) >= 3

    def counts(self, completion: str, written: list, length: int, broken_off: bool) -> bool:
        whole = length == len(self.coming) or self.coming[length][0] is not None
        lines = whole or self.lines(length) > 1
        within = broken_off and not any(c in "\r\n" for c in completion[written[-1][2] :])
        if not self.inline:
            return lines or (within and length >= 3)
        overlap = "".join(char for _, char, _ in self.coming[:length])
        if self.in_word(completion, written[-length][2]) and length < 8:
            return False
        if not lines and not within:
            (_, last, at), (_, following, then) = self.coming[length - 1 : length + 1]
            if then == at + 1 and is_word(last) and is_word(following):
                return False
        return (
            overlap[0] in ",;:"
            or sum(char not in "()[]{}" for char in overlap) >= 3
            or (lines and any(char not in "()[]{}\"'`" for char in overlap))
            or (overlap[0] in "\"'`" and completion.count(overlap[0]) % 2 == 1)
            or (
                unmatched(completion)[1]
                and unmatched(overlap, unmatched(self.prefix + completion)[0])[1]
            )
        )


PARTS = ["a", "ab", "(", ")", '"', ", ", "\n", "\n  ", "\n\n  ", "  ", "\r\n", "b = a"]
TEXTS = st.text('ab()[" ,\n', max_size=12) | st.lists(st.sampled_from(PARTS), max_size=6).map(
    "".join
)


@st.composite
def overflowing(draw: st.DrawFn) -> tuple[str, str, str]:
    """A prefix, a completion that probably repeats some of the suffix, and the suffix."""
    prefix, own, suffix = draw(TEXTS), draw(TEXTS), draw(TEXTS)
    repeated = suffix[: draw(st.integers(0, len(suffix)))]
    return prefix, own + repeated + draw(st.just("") | TEXTS), suffix


@settings(deadline=None, max_examples=200)
@given(overflowing(), st.booleans(), st.data())
@example(("    ", "a\n    b = a\n", "\n    b = a\n"), False, None)
@example(("", "b\n" * 130, "b\n" * 120), False, None)
@example((BODY, "a" + LINES * 3, LINES * 2), True, None)
@example(("f(", "x = " + "abc" * 80, ", " + "abc" * 80), True, None)
@example(("f(", ", " + "abc" * 80, ", " + "abc" * 80), True, None)
def test_pieces_make_the_whole_however_the_completion_is_cut(texts, broken_off, data) -> None:
    prefix, completion, suffix = texts
    end = Reference(prefix, suffix).end(completion, broken_off)
    assert without_overlap(completion, prefix, suffix, broken_off=broken_off) == completion[:end]
    places = data.draw(st.sets(st.integers(0, len(completion)), max_size=6)) if data else set()
    bounds = sorted({0, len(completion)} | places)
    scanner = OverlapScanner(prefix, suffix)
    pieces = [scanner.push(completion[a:b]) for a, b in itertools.pairwise(bounds)]
    pieces.append(scanner.finish(broken_off=broken_off))
    assert "".join(pieces) == completion[:end]
    assert scanner.cut == (end < len(completion))


@settings(deadline=None, max_examples=60)
@given(overflowing())
def test_held_characters_are_those_that_some_continuation_cuts_off(texts) -> None:
    prefix, completion, suffix = texts
    suffix += "\n  return ab\n"  # enough to be no coincidence
    scanner = OverlapScanner(prefix, suffix)
    shown = scanner.push(completion)
    if scanner.done:
        return
    reference = Reference(prefix, suffix)
    # If the completion goes on as the suffix does, from wherever it may be in it.
    rests = {suffix[at:] for at in range(len(suffix))}
    blanks = {"", "\n", "\n  ", " ", "  ", "   "}
    ends = [
        reference.end(completion + blank + rest, broken_off=False)
        for blank in blanks
        for rest in rests
    ]
    assert len(shown) == min(len(completion), *ends)


@settings(deadline=None)
@given(st.lists(st.text("abcd =.", min_size=8, max_size=20), min_size=1, max_size=3), TEXTS)
def test_repeated_lines_are_always_found(lines: list[str], own: str) -> None:
    suffix = "".join(f"\n    {line.strip() or 'a'}" for line in lines)
    kept = without_overlap(f"x{own}y{suffix}", "    ", f"{suffix}\nend")
    assert len(kept) <= len(f"x{own}y")
