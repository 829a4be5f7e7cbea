"""Which carets are answered as on an empty line above the caret's."""

import pytest

from midfill.infill.planner import opened_line_break


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("x = 1\n", "    return x\n"),
        ("x = 1\n", "y"),
        ("", "y = 2\n"),
        ("", "y"),
        ("\n\n", " z"),
        ("x\r\ny\n", "z\r\n"),
    ],
)
def test_carets_at_the_start_of_a_line_with_text(prefix: str, suffix: str) -> None:
    assert opened_line_break(prefix, suffix) == "\n"


@pytest.mark.parametrize(("prefix", "suffix"), [("x\r\n", "  y"), ("", "y\r\nz\n")])
def test_the_line_break_is_the_documents(prefix: str, suffix: str) -> None:
    assert opened_line_break(prefix, suffix) == "\r\n"


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("x = 1\n", ""),
        ("", ""),
        ("x = 1\n", "\n    return x"),
        ("x = 1\r\n", "\r\ny"),
        ("x = 1\n", "    \n    return x"),
        ("\n\n", " "),
        ("x = ", "1\n"),
        ("    ", "return x\n"),
        ("x\r", "\ny"),
        ("x\r", "y"),
    ],
)
def test_all_other_carets_are_left_as_they_are(prefix: str, suffix: str) -> None:
    assert opened_line_break(prefix, suffix) == ""
