"""Which requests are still worth an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.lsp.completer import CaretPlace, PendingRequests, Request, caret_after
from midfill.lsp.documents import Change, Document, Position, Range


def request(
    number: int, uri: str = "a", revision: int = 0, index: int = 0, **fields: object
) -> Request:
    given = {"kind": "inline", "invoked": False} | fields
    return Request(number, uri, revision, index, **given)  # type: ignore[arg-type]


def pending(*requests: Request) -> tuple[Request, ...]:
    """What is left after requests have arrived one after the other."""
    state = PendingRequests()
    for each in requests:
        state = state.arrived(each)
    return state.requests


def test_a_change_makes_all_requests_for_its_document_obsolete() -> None:
    one, menu, other = request(1), request(2, kind="menu"), request(3, uri="b")
    state = PendingRequests().arrived(one).arrived(menu).arrived(other)
    assert state.changed("a").requests == (other,)
    assert state.changed("c").requests == (one, menu, other)


def test_a_request_supersedes_earlier_ones_for_its_document() -> None:
    old, new = request(1, index=4), request(2, index=5)
    assert pending(old, new) == (new,)
    same = request(3, index=5)
    assert pending(new, same) == (same,)


def test_requests_of_the_other_kind_and_for_other_documents_stay() -> None:
    requests = request(1), request(2, kind="menu"), request(3, uri="b")
    assert pending(*requests) == requests


def test_what_the_user_asked_for_is_not_given_up_for_a_request_of_the_editor() -> None:
    asked, automatic = request(1, invoked=True), request(2)
    assert pending(asked, automatic) == (asked, automatic)
    assert pending(automatic, asked) == (asked,)
    assert pending(asked, request(2, invoked=True)) == (request(2, invoked=True),)
    # Elsewhere the user has moved on.
    moved = request(2, index=9)
    assert pending(asked, moved) == (moved,)


def test_only_requests_of_the_editor_wait() -> None:
    assert request(1).delay(0.05) == 0.05
    assert request(1, invoked=True).delay(0.05) == 0.0


def test_an_answered_request_is_no_longer_pending() -> None:
    one, other = request(1), request(2, uri="b")
    assert PendingRequests((one, other)).answered(one).requests == (other,)
    assert PendingRequests((other,)).answered(one).requests == (other,)


REQUESTS = st.builds(
    Request,
    st.integers(0, 99), st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 1),
    st.sampled_from(["inline", "menu"]), st.booleans(),
)  # fmt: skip


@given(requests=st.lists(REQUESTS, unique_by=lambda each: each.number))
def test_at_most_one_request_of_the_editor_and_one_of_the_user_wait_per_document_and_kind(
    requests: list[Request],
) -> None:
    left = pending(*requests)
    keys = [(each.uri, each.kind, each.invoked) for each in left]
    assert len(keys) == len(set(keys))
    assert left[-1:] == tuple(requests[-1:])


BEFORE = Document.opened("file:///a", "one\ntwo\n", "utf-16")


@pytest.mark.parametrize(
    ("change", "caret"),
    [
        (Change("x", Range(Position(1, 1), Position(1, 1))), 6),
        (Change("", Range(Position(1, 1), Position(1, 3))), 5),
        (Change("", Range(Position(1, 3), Position(1, 1))), 5),
        (Change("a\n  ", Range(Position(0, 3), Position(1, 0))), 7),
        (Change("x" * 201, Range(Position(0, 0), Position(0, 0))), None),
        (Change("all of it"), None),
    ],
)
def test_a_change_tells_where_the_caret_is(change: Change, caret: int | None) -> None:
    assert caret_after(BEFORE, [change]) == caret


def test_several_changes_tell_nothing() -> None:
    change = Change("x", Range(Position(0, 0), Position(0, 0)))
    assert caret_after(BEFORE, [change, change]) is None
    assert caret_after(BEFORE, []) is None


def test_carets_in_adjacent_lines_are_near() -> None:
    place = CaretPlace("a", 5)
    assert [place.near(CaretPlace("a", line)) for line in (3, 4, 5, 6, 7)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    assert not place.near(CaretPlace("b", 5))
    assert not place.near(None)
