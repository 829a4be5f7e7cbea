"""Views: a sliding window gives a standing prompt; a document sent whole is never touched."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.view import View, find_overlap, updated_view


def shows_what_was_sent(view: View) -> bool:
    """Return whether a prompt holds what was sent, no more and no less."""
    return (view.left, view.right) == (view.sent_left, view.sent_right)


LINES = [f"    value_{number} = compute({number * 7919 % 1000})\n" for number in range(600)]
TEXT = "".join(LINES)
NO_LIMIT = 10**9


class Client:
    """An editor that sends a window of its document, and what the server makes of it."""

    def __init__(
        self,
        text: str,
        caret: int,
        characters: int | None,
        lines: int | None = None,
        header: str = "",
    ):
        self.text, self.caret = text, caret
        self.characters, self.lines, self.header = characters, lines, header
        self.view = View.of(*self.window())

    def window(self) -> tuple[str, str]:
        prefix, suffix = self.text[: self.caret], self.text[self.caret :]
        if self.characters is not None:
            prefix, suffix = prefix[-self.characters :], suffix[: self.characters]
        elif self.lines is not None:
            prefix = "\n".join(prefix.split("\n")[-self.lines - 1 :])
            suffix = "\n".join(suffix.split("\n")[: self.lines + 1])
        return self.header + prefix, suffix

    def type(self, text: str) -> View:
        return self.replace(self.caret, self.caret, text)

    def erase(self, count: int) -> View:
        return self.replace(max(0, self.caret - count), self.caret, "")

    def go(self, caret: int) -> View:
        self.caret = min(max(0, caret), len(self.text))
        return self.ask()

    def replace(self, start: int, end: int, new: str) -> View:
        self.text = self.text[:start] + new + self.text[end:]
        self.caret = start + len(new)
        return self.ask()

    def ask(self, max_characters: int = NO_LIMIT) -> View:
        prefix, suffix = self.window()
        at = find_overlap(self.view, prefix, suffix)
        if 2 * at.shared < len(prefix) + len(suffix):
            self.view = View.of(prefix, suffix)
        else:
            self.view = updated_view(self.view, at, prefix, suffix, max_characters=max_characters)
        return self.view

    @property
    def truthful(self) -> bool:
        """Whether the prompt holds the document's own text around the caret."""
        before, after = self.text[: self.caret], self.text[self.caret :]
        shown = self.view.prefix.removeprefix(self.header)
        headed = self.view.prefix.startswith(self.header)
        return headed and before.endswith(shown) and after.startswith(self.view.suffix)


def test_a_window_of_characters_stands_still_while_it_slides() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    start, tail = client.view.prefix[:100], client.view.suffix
    for _ in range(300):
        view = client.type("abc")
        assert view.prefix.startswith(start)
        assert view.suffix == tail
        assert client.truthful


def test_a_window_of_lines_stands_still_while_lines_are_typed() -> None:
    client = Client(TEXT, len("".join(LINES[:300])), None, lines=40)
    start, tail = client.view.prefix[:100], client.view.suffix
    for _ in range(15):
        for typed in ("    x = ", "1", "\n"):
            view = client.type(typed)
            assert view.prefix.startswith(start)
            assert view.suffix == tail
            assert client.truthful


def test_deleting_backwards_does_not_pull_in_text_at_the_left() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    start = client.view.prefix[:100]
    for _ in range(40):
        assert client.erase(5).prefix.startswith(start)


def test_edges_move_in_rare_large_hops() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    starts = {client.view.prefix[:100]}
    for _ in range(3000):
        starts.add(client.type("xy\n").prefix[:100])
    assert 2 <= len(starts) <= 6  # 9,000 characters typed


def test_a_prompt_grows_to_one_and_a_half_times_what_was_sent_at_most() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    for _ in range(500):
        view = client.type("wxyz\n")
        assert view.right - view.left <= 1.5 * 4000
        assert view.prefix.endswith(client.text[client.caret - 1500 : client.caret])


def test_remembered_text_never_makes_a_prompt_longer_than_the_limit() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    for _ in range(200):
        client.text += ""
        client.text = client.text[: client.caret] + "wxyz\n" + client.text[client.caret :]
        client.caret += 5
        view = client.ask(max_characters=4100)
        assert view.right - view.left <= 4100


def test_moving_down_and_back_keeps_the_left_edge() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    start = client.view.prefix[:100]
    for caret in (12_300, 12_900, 12_100, 13_000):
        assert client.go(caret).prefix.startswith(start)
        assert client.truthful


def test_a_whole_document_is_sent_as_it_is_whatever_happens_to_it() -> None:
    client = Client(TEXT, 12_000, None)
    edits = [
        lambda: client.type("typed"),
        lambda: client.replace(0, 40, ""),  # the first line is deleted
        lambda: client.replace(0, 0, "import os\n"),
        lambda: client.replace(len(client.text) - 30, len(client.text), ""),
        lambda: client.go(len(client.text)),
        lambda: client.erase(7),
        lambda: client.go(3),
        lambda: client.erase(3),
    ]
    for edit in edits:
        edit()
        assert client.view.prefix + client.view.suffix == client.text


def test_text_that_disagrees_with_what_is_remembered_is_not_used() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    client.type("abc" * 100)
    assert not shows_what_was_sent(client.view)
    # The file changes on disk, also where the window begins: nothing remembered fits any more.
    client.text = client.text.replace("value", "other")
    view = client.ask()
    assert shows_what_was_sent(view)
    assert client.truthful


def test_a_window_that_grows_is_a_document_and_remembered_text_is_dropped() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    client.type("abc" * 100)
    assert not shows_what_was_sent(client.view)
    prefix, suffix = client.window()
    for typed in ("\n", "\n\n"):  # the left edge stands, the text gets longer
        at = find_overlap(client.view, prefix + typed, suffix)
        client.view = updated_view(client.view, at, prefix + typed, suffix, max_characters=NO_LIMIT)
    assert client.view.prefix == prefix + "\n\n"


actions = st.lists(
    st.one_of(
        st.tuples(st.just("type"), st.text("ab \n(", min_size=1, max_size=12)),
        st.tuples(st.just("erase"), st.integers(1, 30)),
        st.tuples(st.just("go"), st.integers(-800, 800)),
        st.tuples(st.just("paste"), st.integers(0, 400)),
        st.tuples(st.just("below"), st.integers(0, 400)),
    ),
    max_size=25,
)
windows = st.sampled_from([(2000, None), (500, None), (None, 20), (None, 60), (None, None)])


@settings(max_examples=150, deadline=None)
@given(actions, windows, st.integers(0, 20_000))
def test_a_prompt_never_holds_text_the_document_does_not_have(steps, window, caret) -> None:
    """Edits inside the window, in any order: nothing stale can come of them.

    Only text that repeats itself for longer than the window could be taken for another place.
    """
    client = Client(TEXT, caret, *window)
    for number, (action, value) in enumerate(steps):
        if action == "type":
            client.type(value)
        elif action == "erase":
            client.erase(value)
        elif action == "go":
            client.go(client.caret + value)
        elif action == "paste":
            client.type("".join(f"pasted({number}, {line})\n" for line in range(value // 20)))
        else:
            inside = max(0, len(client.window()[1]) - 3)
            place = client.caret + min(value, inside)
            client.text = client.text[:place] + "changed" + client.text[place + 3 :]
            client.ask()
        assert client.truthful
        sent = client.window()
        if window == (None, None):
            assert (client.view.prefix, client.view.suffix) == sent
        assert len(client.view.prefix) >= 0.75 * len(sent[0]) - 1
        assert len(client.view.suffix) >= 0.75 * len(sent[1]) - 1


@settings(max_examples=300, deadline=None)
@given(st.text("ab\n", max_size=400), st.text("ab\n", max_size=400), st.data())
def test_any_two_requests_can_be_overlapped(old, new, data) -> None:
    """No matter how repetitive, the view stays consistent and keeps most of what was sent."""
    caret = data.draw(st.integers(0, len(old)))
    view = View.of(old[:caret], old[caret:])
    for _ in range(3):
        caret = data.draw(st.integers(0, len(new)))
        prefix, suffix = new[:caret], new[caret:]
        view = updated_view(
            view, find_overlap(view, prefix, suffix), prefix, suffix, max_characters=NO_LIMIT
        )
        assert view.text[view.sent_left : view.sent_right] == new
        assert 0 <= view.left <= view.caret <= view.right <= len(view.text)
        assert view.right - view.left <= 1.5 * len(new) + 1
        new = random.Random(len(new)).choice([new[1:], new + "ab", new[:-3], "b" + new])


def test_the_view_has_a_maximum_size() -> None:
    client = Client(TEXT * 10, 12_000, characters=500)
    for step in range(600):
        client.go(12_000 + step * 200)
    assert len(client.view.text) <= 1000 * (1 + 2 * 4)


HEADER = "# language: python\n# indentation: use 4 spaces for a tab\n"


def test_a_window_behind_a_header_stands_still_too() -> None:
    for size in ({"characters": 2000}, {"characters": None, "lines": 40}):
        client = Client(TEXT, len("".join(LINES[:300])), header=HEADER, **size)
        for number in range(20):
            first = client.type(f"    typed_{number} = 1\n")
        assert first.header == HEADER
        stands = 0
        for typed in ("    x = ", "1", "\n") * 20:
            before, view = client.view, client.type(typed)
            assert client.truthful
            stands += view.prefix == before.prefix + typed
            assert view.suffix == before.suffix
        assert stands >= 57  # all but rare hops


def test_a_window_behind_a_header_may_move_anywhere() -> None:
    client = Client(TEXT, 12_000, characters=2000, header=HEADER)
    for caret in (12_400, 13_000, 12_700, 11_000, 500, 0, 900, 3000, 20_000, 19_500):
        client.go(caret)
        assert client.truthful
        client.type("x")
        assert client.truthful


def test_a_header_that_comes_to_be_or_changes_or_goes_is_shown_as_it_is() -> None:
    client = Client(TEXT, 12_000, characters=2000)
    for header in ("", HEADER, HEADER, HEADER.replace("4", "8"), HEADER + "# more\n", ""):
        client.header = header
        for _ in range(4):
            client.type("some text\n")
            assert client.truthful


def test_lines_that_are_deleted_far_above_are_no_window_that_slides() -> None:
    client = Client(TEXT, 12_000, characters=None)
    start = len("".join(LINES[:2]))
    client.text = client.text[:start] + client.text[start + 400 :]
    client.caret -= 400
    view = client.ask()
    assert (view.header, view.prefix) == ("", client.text[: client.caret])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, len(TEXT))), max_size=12))
def test_whatever_happens_behind_a_header_the_prompt_is_truthful(
    edits: list[tuple[int, int]],
) -> None:
    client = Client(TEXT, 12_000, characters=3000, header=HEADER)
    for kind, number in edits:
        if kind == 0:
            client.go(number)
        elif kind == 1:
            client.type(f"number {number}\n" * (1 + number % 5))
        elif kind == 2:
            client.erase(number % 200)
        else:
            client.go(client.caret + number % 900 - 450)
        assert client.truthful
