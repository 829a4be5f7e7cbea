"""Snippets: shown at first, then changed where it costs little, and never for more than a share."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.context_files import (
    SHARE,
    ContextFile,
    DocumentSnippets,
    SnippetAccount,
    Snippets,
    newest,
    news,
)

ALLOWANCE = 2000


def chunk(number: int, lines: int = 20) -> ContextFile:
    text = "".join(f"value_{number}_{line} = compute({line})\n" for line in range(lines))
    return ContextFile(text, f"{number % 3}.py")


def ring(first: int, count: int = 4) -> Snippets:
    return tuple(chunk(number) for number in range(first, first + count))


def length(files: Snippets) -> int:
    return sum(len(file.path) + len(file.text) for file in files)


def rich_account() -> SnippetAccount:
    return SnippetAccount(ALLOWANCE, computed=10**6)


def shown_on_request(
    offered: Snippets,
    standing: Snippets = (),
    cached: int = 0,
    account: SnippetAccount | None = None,
) -> Snippets:
    document = DocumentSnippets(standing=standing)
    document.adopt_on_request(account or rich_account(), offered, cached)
    return document.standing


class TestNewest:
    def test_the_last_files_are_kept_in_their_order(self) -> None:
        files = ring(0)
        assert newest(files, length(files)) == files
        assert newest(files, len(files[-1].text) + len(files[-2].text)) == files[-2:]
        assert newest(files, 0) == ()

    def test_the_file_that_fits_in_part_is_shortened_to_whole_lines(self) -> None:
        one, two = ring(0, 2)
        first, second = newest((one, two), len(two.text) + 50)
        assert second == two
        assert one.text.startswith(first.text)
        assert first.text.endswith("\n")
        assert 0 < len(first.text) <= 50

    def test_a_long_line_is_never_divided(self) -> None:
        assert newest((ContextFile("x" * 100),), 50) == ()


class TestOnRequest:
    def test_the_first_ones_are_shown_at_once(self) -> None:
        assert shown_on_request(ring(0, 2), account=SnippetAccount(ALLOWANCE)) == ring(0, 2)

    def test_a_cached_document_keeps_what_it_shows(self) -> None:
        for offered in (ring(9), ring(1), ring(0, 3), ring(0, 5), ()):
            assert shown_on_request(offered, ring(0), cached=3000) == ring(0)

    def test_a_document_that_is_computed_anyway_changes(self) -> None:
        assert shown_on_request(ring(9), ring(0)) == ring(9)

    def test_nothing_changes_without_news(self) -> None:
        for offered in (ring(0, 2), ring(1, 3)):
            assert shown_on_request(offered, ring(0)) == ring(0)

    def test_a_client_that_sends_none_any_more_is_followed(self) -> None:
        assert shown_on_request((), ring(0), cached=3000) == ring(0)
        assert shown_on_request((), ring(0)) == ()

    def test_what_stays_stays_first(self) -> None:
        one, two, three, four = ring(0)
        assert shown_on_request((three, four, one), (one, two)) == (one, three, four)

    def test_another_document_takes_what_the_last_one_showed(self) -> None:
        account = SnippetAccount(length(ring(0)))
        document = DocumentSnippets()
        document.adopt_on_request(account, ring(0), 0)
        spent = account.spent
        other = DocumentSnippets()
        other.adopt_on_request(account, ring(9), 0)  # other parts of the same files
        assert other.standing == ring(0)
        assert account.spent == spent
        stranger = tuple(ContextFile(file.text, f"elsewhere/{file.path}") for file in ring(7))
        alone = DocumentSnippets()
        alone.adopt_on_request(account, stranger, 0)  # nothing in common, and nothing left to spend
        assert alone.standing == ()


class TestInIdleTime:
    def test_a_change_that_shows_much_is_prepared_once(self) -> None:
        account, document = rich_account(), DocumentSnippets(standing=ring(0), offered=ring(9))
        assert document.prepare(account, cached=1000) == ring(9)
        spent = account.spent
        assert spent == length(ring(9)) + 1000
        document.adopt_on_request(account, ring(9), cached=3000)
        assert document.standing == ring(0)
        assert document.prepare(account, cached=1000) == ring(9)
        assert account.spent == spent
        document.record_computed(account)
        assert document.standing == account.standing == ring(9)
        assert document.prepare(account, cached=1000) is None

    @pytest.mark.parametrize("offered", [ring(1), ring(0, 5), ring(0, 3), ()])
    def test_a_change_that_shows_little_is_not(self, offered: Snippets) -> None:
        document = DocumentSnippets(standing=ring(0), offered=offered)
        assert document.prepare(rich_account(), cached=3000) is None

    def test_nothing_is_prepared_that_is_not_affordable(self) -> None:
        document = DocumentSnippets(standing=ring(0), offered=ring(9))
        assert document.prepare(SnippetAccount(1000), cached=1000) is None


def test_news_are_lines_that_no_standing_file_has() -> None:
    one, two = ContextFile("a = 1\nb = 2\n", "x"), ContextFile("b = 2\nc = 3\n", "y")
    assert news((two,), (one,)) == len("y" + "c = 3\n")
    assert news((one,), (two, one)) == 0
    assert news((one, two), ()) == len("x" + one.text + "y" + two.text)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3000), st.floats(0, 1))
def test_prices_never_exceed_their_share(seed: int, document_length: int, cold: float) -> None:
    """A ring turns while its user goes through three documents."""
    chance, account, first = random.Random(seed), SnippetAccount(ALLOWANCE), 0
    documents = [DocumentSnippets() for _ in range(3)]
    paid = 0  # counted here, by what is shown
    for _ in range(200):
        document = chance.choice(documents)
        first += chance.random() < 0.3
        cached = 0 if chance.random() < cold else document_length
        before, known = document.standing, account.standing
        account.computed += document_length - cached
        document.adopt_on_request(account, ring(first), cached)
        if document.standing not in (before, known):
            paid += cached
        if chance.random() < 0.5 and (files := document.prepare(account, document_length)):
            document.record_computed(account)
            assert document.standing == files
            paid += document_length
        assert paid <= account.spent <= ALLOWANCE + SHARE * account.computed
