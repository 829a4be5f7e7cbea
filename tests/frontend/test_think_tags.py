"""Think tags: what of an answer is reasoning, and what is content."""

import itertools
from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from midfill.frontend.channels import ChannelReader, Event, Marker
from midfill.frontend.think_tags import TAGS, ThinkParser

THINK = TAGS[0]


def read(answer: Iterable[Event], *, spelled: bool = True, opened: bool = False) -> tuple[str, str]:
    """Return an answer's reasoning and its content."""
    reader = ChannelReader({}, ThinkParser(THINK, spelled=spelled, opened=opened))
    content = "".join(reader.read(event) for event in answer) + reader.finish()
    reasoning, calls = reader.take()
    assert not calls
    return reasoning, content


def expected(text: str, *, opened: bool) -> tuple[str, str]:
    """Return the same of a whole text, by searching it."""
    begins = text.lstrip()
    if begins.startswith("<think>"):
        rest = begins.removeprefix("<think>")
    elif opened:
        rest = text
    else:
        return "", text
    while (inner := rest.lstrip()).startswith("<think>"):
        rest = inner.removeprefix("<think>")
    reasoning, closed, content = rest.partition("</think>")
    return reasoning.strip(), content.lstrip() if closed else ""


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm. </think>\n\nHi.\n", "Hm.", "Hi.\n"),
        ("\n<think>Hm.</think>Hi.", "Hm.", "Hi."),
        ("<think>\n\n</think>\n\nHi.", "", "Hi."),
        ("<think>Hm.", "Hm.", ""),
        ("<think>Hm.</thi", "Hm.</thi", ""),
        ("<think>", "", ""),
        ("<thi", "", "<thi"),
        (" \nHi.", "", " \nHi."),
        ("<b>Hi.</b>", "", "<b>Hi.</b>"),
        ("Tags are <think> and </think>.", "", "Tags are <think> and </think>."),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
    ],
)
def test_what_stands_between_tags_at_the_start_is_reasoning(
    text: str, reasoning: str, content: str
) -> None:
    assert read([text]) == (reasoning, content) == expected(text, opened=False)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nHm.\n</think>\n\nHi.", "Hm.", "Hi."),
        ("</think>Hi.", "", "Hi."),
        ("Hm.", "Hm.", ""),
        ("<think>\nHm.</think>Hi.", "Hm.", "Hi."),  # some models open it once more
    ],
)
def test_a_prompt_may_open_the_tag(text: str, reasoning: str, content: str) -> None:
    assert read([text], opened=True) == (reasoning, content) == expected(text, opened=True)


PARTS = st.sampled_from(["<think>", "</think>", "<", "/", "think>", "<thi", " ", "\n", "a", "b "])


@given(st.lists(PARTS, max_size=12), st.booleans(), st.data())
def test_tags_are_found_however_tokens_divide_them(
    parts: list[str], opened: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert read(cut, opened=opened) == expected(text, opened=opened)


TOKENS = st.sampled_from([Marker.START, Marker.END, " ", "a", "\n"])


@given(st.lists(TOKENS, max_size=12), st.booleans())
def test_tags_that_are_tokens_divide_an_answer_like_spelled_ones(
    events: list[Event], opened: bool
) -> None:
    names: dict[Event, str] = {Marker.START: "<think>", Marker.END: "</think>"}
    text = "".join(names.get(event, str(event)) for event in events)
    assert read(events, spelled=False, opened=opened) == expected(text, opened=opened)


def test_where_tags_are_tokens_a_spelled_one_is_text() -> None:
    events: list[Event] = [Marker.START, "Close it by </think>.", Marker.END, "OK <think>"]
    assert read(events, spelled=False) == ("Close it by </think>.", "OK <think>")


@given(st.lists(PARTS, max_size=12), st.booleans(), st.data())
def test_what_was_shown_is_never_taken_back(
    parts: list[str], opened: bool, data: st.DataObject
) -> None:
    """Only where an answer ends, a tag's beginning and blanks turn out to be text."""
    parser = ThinkParser(THINK, spelled=True, opened=opened)
    shown = {"reasoning": "", "content": ""}
    for part in parts[: data.draw(st.integers(0, len(parts)))]:
        for piece in parser.push(part):
            shown[piece.kind] += piece.text
    reasoning, content = read(parts, opened=opened)
    assert reasoning.startswith(shown["reasoning"])
    assert content.startswith(shown["content"])


def test_text_that_no_tag_can_begin_with_is_shown_at_once() -> None:
    parser = ThinkParser(THINK, spelled=True, opened=False)
    assert "".join(piece.text for piece in parser.push("a <")) == "a <"
    thinking = ThinkParser(THINK, spelled=True, opened=True)
    assert [piece.text for piece in thinking.push("a b ")] == ["a b"]


def test_whether_text_is_content_is_unknown_until_a_tag_is_ruled_out() -> None:
    parser = ThinkParser(THINK, spelled=True, opened=False)
    known = []
    for text in ("\n", "<", "think>", "a", "</think>", "\n", "b"):
        parser.push(text)
        known.append(parser.in_content)
    assert known == [None, None, False, False, False, False, True]
    parser = ThinkParser(THINK, spelled=True, opened=False)
    parser.push("<")
    parser.finish()
    assert parser.in_content
