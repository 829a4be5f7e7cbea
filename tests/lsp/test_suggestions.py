"""The last suggestion of a document, while it is typed."""

import pytest

from midfill.lsp.suggestions import Caret, LastSuggestions, Suggestion

URI = "file:///a.py"


@pytest.fixture
def last() -> LastSuggestions:
    last = LastSuggestions()
    last.remember(Caret(URI, "x = ", "\ny"), Suggestion("s", "foo(\n    bar)"))
    return last


@pytest.mark.parametrize(
    ("prefix", "rest"),
    [
        ("x = ", "foo(\n    bar)"),
        ("x = fo", "o(\n    bar)"),
        ("x = foo(\n    b", "ar)"),
    ],
)
def test_what_was_typed_of_it_is_left_out(last: LastSuggestions, prefix: str, rest: str) -> None:
    assert last.rest(Caret(URI, prefix, "\ny")) == Suggestion("s", rest)


@pytest.mark.parametrize(
    "caret",
    [
        Caret(URI, "x = fa", "\ny"),  # something else was typed
        Caret(URI, "x =", "\ny"),  # deleted
        Caret(URI, "x = f", ")\ny"),  # typed, and changed elsewhere
        Caret(URI, "z = f", "\ny"),
        Caret(URI, "x = foo(\n    bar)", "\ny"),  # nothing is left
        Caret(URI, "x = foo(\n    bar) + 1", "\ny"),
        Caret("file:///b.py", "x = f", "\ny"),
    ],
)
def test_it_fits_no_other_caret(last: LastSuggestions, caret: Caret) -> None:
    assert last.rest(caret) is None


def test_blanks_that_are_left_are_no_suggestion() -> None:
    last = LastSuggestions()
    last.remember(Caret(URI, "", ""), Suggestion("s", "a \n "))
    assert last.rest(Caret(URI, "a", "")) is None


def test_it_can_be_forgotten(last: LastSuggestions) -> None:
    last.forget("file:///b.py")
    assert last.rest(Caret(URI, "x = ", "\ny")) is not None
    last.forget(URI)
    assert last.rest(Caret(URI, "x = ", "\ny")) is None


def test_the_model_is_shown_plain_line_feeds() -> None:
    caret = Caret.in_text(URI, "a\r\nb\rc\nd", 5)
    assert (caret.prefix, caret.suffix) == ("a\nb\n", "c\nd")
    assert not caret.at_line_end
    assert Caret.in_text(URI, "a\r\nb", 1).at_line_end
    assert Caret.in_text(URI, "a", 1).at_line_end
