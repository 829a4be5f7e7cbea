"""StopScanner: finds stop strings across chunks and holds back no more than needed."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from midfill.frontend.stops import StopScanner, StopStrings

# Few letters, so that stop strings overlap each other and themselves.
words = st.text("ab\n", max_size=4)
texts = st.text("ab\n", max_size=30)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the earliest-ending stop string starts, the longest if several end there; naively."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return end - len(longest), longest
    return None


def scan(chunks: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    scanner = StopScanner(StopStrings(stops), include_stop=include)
    shown = "".join(scanner.push(chunk) for chunk in chunks)
    return shown + scanner.flush(), scanner.stopped


@given(st.lists(texts, max_size=6), st.lists(words, max_size=4), st.booleans())
def test_the_result_does_not_depend_on_chunks(
    chunks: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(chunks)
    found = first_stop(text, stops)
    if found is None:
        expected: tuple[str, str | None] = (text, None)
    else:
        start, stop = found
        expected = (text[: start + len(stop)] if include else text[:start], stop)
    assert scan(chunks, stops, include=include) == expected


@given(texts, st.lists(words, min_size=1, max_size=4))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    shown, seen = "", ""
    for character in text:
        shown += scanner.push(character)
        seen += character
        if scanner.stopped is not None:
            break
        held = seen[len(shown) :]
        # Every longer end of the text begins no stop string.
        longest = max(
            (k for k in range(len(seen) + 1) for s in stops if s[:k] == seen[len(seen) - k :]),
            default=0,
        )
        assert len(held) == longest


def test_nothing_is_returned_after_a_stop_string() -> None:
    scanner = StopScanner(StopStrings(["END"]))
    assert scanner.push("one END two") == "one "
    assert scanner.push("three") == ""
    assert scanner.flush() == ""
    assert scanner.stopped == "END"


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_text_passes(stops: list[str]) -> None:
    assert scan(["a", "b"], stops) == ("ab", None)
