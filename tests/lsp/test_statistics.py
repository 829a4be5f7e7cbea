"""What became of suggestions."""

import pytest

from midfill.lsp.statistics import Statistics


@pytest.fixture
def statistics() -> Statistics:
    """One suggestion of ten code units was sent, in an item that begins with three more."""
    statistics = Statistics()
    statistics.record_sent("s", replaced=3, length=10)
    return statistics


def accepted(statistics: Statistics) -> tuple[int, int, int]:
    counts = statistics.counts
    return counts.accepted, counts.partially_accepted, counts.accepted_characters


def test_a_suggestion_is_accepted_once(statistics: Statistics) -> None:
    statistics.record_accepted("s")
    statistics.record_accepted("s")
    assert accepted(statistics) == (1, 0, 10)


def test_parts_are_counted_from_the_items_beginning(statistics: Statistics) -> None:
    for length, characters in [(3, 0), (5, 2), (5, 2), (9, 6), (7, 6), (99, 10)]:
        statistics.record_partially_accepted("s", length)
        assert statistics.counts.accepted_characters == characters
    statistics.record_accepted("s")
    assert accepted(statistics) == (1, 1, 10)


def test_a_suggestion_is_shown_once(statistics: Statistics) -> None:
    statistics.record_shown("s")
    statistics.record_shown("s")
    assert statistics.counts.shown == 1


@pytest.mark.parametrize("unknown", ["other", None, 3, ["s"], {}])
def test_unknown_suggestions_count_for_nothing(statistics: Statistics, unknown: object) -> None:
    statistics.record_shown(unknown)
    statistics.record_accepted(unknown)
    statistics.record_partially_accepted(unknown, 9)
    assert accepted(statistics) == (0, 0, 0)
    assert statistics.counts.shown == 0


def test_the_rest_of_a_suggestion_is_no_new_one(statistics: Statistics) -> None:
    statistics.record_sent("s", replaced=4, length=9)
    assert statistics.counts.completions == 1
    statistics.record_accepted("s")
    assert statistics.counts.accepted_characters == 9


def test_old_suggestions_are_forgotten(statistics: Statistics) -> None:
    for number in range(2000):
        statistics.record_sent(str(number), 0, 1)
    statistics.record_accepted("s")
    statistics.record_accepted("1999")
    assert statistics.counts.accepted == 1
    assert statistics.counts.completions == 2001
