"""What prompts of documents will probably cost."""

from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.scheduling.expected_work import ANSWER_TOKENS, ExpectedWork

COSTS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 300), st.integers(0, 300)))


def test_a_document_is_cached_until_others_fill_most_of_the_pool() -> None:
    work = ExpectedWork()
    work.slots = 700  # of which 525 are counted on
    for document in "abcde":
        work.record(document, 100, 100)
    assert all(work.is_cached(document) for document in "abcde")
    work.record("a", 100, 10)  # used again, it isn't the oldest
    work.record("f", 100, 100)
    assert [document for document in "abcdef" if work.is_cached(document)] == list("acdef")


def test_nothing_counts_as_evicted_while_the_pool_is_unknown() -> None:
    work = ExpectedWork()
    for number in range(100):
        work.record(f"{number}", 100_000, 100_000)
    assert work.is_cached("0")


def test_a_request_without_a_document_counts_whole() -> None:
    work = ExpectedWork()
    work.record("", 100, 1)
    assert work.tokens("", 100) == 100 + ANSWER_TOKENS
    assert not work.is_cached("")


def test_after_a_restart_nothing_is_cached() -> None:
    work = ExpectedWork()
    work.record("a", 100, 1)
    work.clear()
    assert not work.is_cached("a")
    assert work.tokens("a", 100) == 100 + ANSWER_TOKENS


@given(COSTS, st.integers(1, 2000))
def test_it_remembers_the_documents_used_last_as_far_as_they_fit(
    costs: list[tuple[str, int, int]], slots: int
) -> None:
    work = ExpectedWork()
    work.slots = slots
    for document, tokens, computed in costs:
        work.record(document, tokens, min(computed, tokens))
    last = {document: tokens for document, tokens, _ in costs}
    by_use = list(dict.fromkeys(document for document, _, _ in reversed(costs)))
    cached = [work.is_cached(document) for document in by_use]
    assert cached == sorted(cached, reverse=True)
    held = [last[document] for document in by_use if work.is_cached(document)]
    assert sum(held) <= 0.75 * slots or len(held) == 1
    for document, tokens in last.items():
        assert ANSWER_TOKENS <= work.tokens(document, tokens) <= tokens + ANSWER_TOKENS
