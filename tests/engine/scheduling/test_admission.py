"""Admission: which requests may be queued."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams, FinishReason
from midfill.engine.scheduling.admission import (
    ANSWER_TOKENS,
    NEW_DOCUMENT,
    Admission,
    ExpectedWork,
    QueueSpeed,
)
from midfill.errors import QueueFullError


def request(name: str, tokens: int, tenant: str = "", **fields: object) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[1] * tokens,
        sampling=EngineSamplingParams(),
        tenant=tenant,
        **fields,
    )


def output(name: str, reason: FinishReason | None = None, cached: int = 0) -> EngineOutput:
    return EngineOutput(
        request_id=name, index=0, token_ids=[1], finish_reason=reason, cached_tokens=cached
    )


def queued(admission: Admission, *requests: EngineRequest, now: float = 0.0) -> Admission:
    admission.add(requests, now)
    return admission


def test_the_queue_is_bounded_in_all() -> None:
    admission = queued(Admission(100), request("a", 60))
    admission.check("", 40, None, 0.0)
    with pytest.raises(QueueFullError, match="at most 100") as raised:
        admission.check("", 41, None, 0.0)
    assert raised.value.retry_after == 1


def test_alone_a_request_of_any_length_is_queued() -> None:
    Admission(100).check("", 1000, None, 0.0)


def test_a_tenant_alone_may_fill_it() -> None:
    admission = queued(Admission(100), request("a", 90, "ann"))
    admission.check("ann", 10, None, 0.0)


def test_where_others_wait_each_tenant_has_half() -> None:
    admission = queued(Admission(100), request("a", 40, "ann"), request("b", 5, "bob"))
    admission.check("ann", 10, None, 0.0)
    with pytest.raises(QueueFullError, match=r"of yours are queued.* at most 50"):
        admission.check("ann", 11, None, 0.0)
    admission.check("cy", 55, None, 0.0)  # it has nothing queued


def test_a_tenants_own_bound() -> None:
    admission = queued(Admission(1000, 30), request("a", 25, "ann"))
    admission.check("bob", 31, None, 0.0)
    with pytest.raises(QueueFullError, match="at most 30"):
        admission.check("ann", 6, None, 0.0)


def test_a_request_that_would_wait_past_its_deadline_is_refused() -> None:
    admission = queued(Admission(10_000), *(request(f"r{n}", 100) for n in range(40)))
    for second in range(20):  # 100 tokens leave the queue each second
        admission.record(output(f"r{second}"), second + 1.0)
    assert admission.expected_wait("") == pytest.approx(20.0)
    admission.check("", 10, None, 20.0)
    admission.check("", 10, 20.0 + 40.0, 20.0)
    with pytest.raises(QueueFullError, match="the queue is about 20 s long") as raised:
        admission.check("", 10, 20.0 + 10.0, 20.0)
    assert raised.value.retry_after == 13  # then 7 of the 10 seconds are enough
    assert admission.expected_wait("other") == 0.0  # it is its turn next


def test_nothing_is_refused_for_a_deadline_before_the_speed_is_known() -> None:
    admission = queued(Admission(10_000), *(request(f"r{n}", 100) for n in range(40)))
    admission.check("", 10, 0.1, 0.0)


def test_requests_that_were_not_answered_say_nothing_about_the_speed() -> None:
    admission = queued(Admission(10_000), *(request(f"r{n}", 100) for n in range(40)))
    for number in range(20):
        if number % 2:
            admission.remove(f"r{number}")
        else:
            admission.record(output(f"r{number}", "expired"), 5.0)
    assert admission.expected_wait("") == 0.0
    assert admission.queued_tokens == 2000


def test_the_speed_is_that_of_the_last_seconds_in_which_there_was_a_queue() -> None:
    speed = QueueSpeed()
    speed.resume(0.0)
    for second in range(1, 60):
        speed.record(1000, float(second))
    assert speed.seconds(5000) == pytest.approx(5.0)
    speed.resume(1000.0)  # idle meanwhile
    assert speed.seconds(5000) == pytest.approx(5.0)
    for second in range(1, 60):
        speed.record(100, 1000.0 + second)
    assert speed.seconds(500) == pytest.approx(5.0, rel=0.05)


def test_nothing_is_left_in_the_end() -> None:
    admission = queued(Admission(100), request("a", 10, "ann"), request("b", 20, "bob"))
    admission.record(output("a"), 1.0)
    admission.record(output("a", "stop"), 1.0)
    admission.remove("b")
    assert admission.queued_tokens == 0
    queued(admission, request("c", 50))
    admission.clear()
    assert admission.queued_tokens == 0
    admission.check("", 1000, None, 2.0)


def moving_queue(documents: int = 40) -> Admission:
    """A queue in which 20 of 40 requests, each for a document, were answered in 20 seconds."""
    admission = queued(
        Admission(10_000), *(request(f"r{n}", 100, document=f"d{n}") for n in range(documents))
    )
    for second in range(20):
        admission.record(output(f"r{second}"), second + 1.0)
    return admission


def test_the_first_request_of_a_document_has_a_short_part_of_the_queue() -> None:
    admission = moving_queue()
    assert admission.expected_wait("") == pytest.approx(20.0)
    admission.check("", 100, 20.0 + 40.0, 20.0)  # whatever it is about
    admission.check("", 100, 20.0 + 40.0, 20.0, "d3")
    for document in (NEW_DOCUMENT, "d100"):
        with pytest.raises(QueueFullError, match="the first request of a document"):
            admission.check("", 100, 20.0 + 40.0, 20.0, document)
        admission.check("", 100, 20.0 + 201.0, 20.0, document)
        admission.check("other", 100, 20.0 + 40.0, 20.0, document)  # it has nothing queued


def test_a_part_of_what_is_computed_is_left_to_first_requests() -> None:
    admission = moving_queue()
    admission.add((request(f"more{n}", 100, document=f"d{n % 20}") for n in range(400)), 20.0)
    refused = 0
    for number in range(400):
        try:
            admission.check("", 100, 1000.0, 21.0 + number, NEW_DOCUMENT)
        except QueueFullError:
            refused += 1
        admission.record(output(f"more{number}"), 21.0 + number)
    assert 0 < refused < 400
    admission.check("", 100, 10_000.0, 421.0, NEW_DOCUMENT)


def test_a_document_that_is_not_cached_any_more_counts_as_new() -> None:
    admission = moving_queue()
    admission.work.slots = 1000
    admission.record(output("r20"), 21.0)
    admission.check("", 100, 21.0 + 40.0, 21.0, "d20")
    with pytest.raises(QueueFullError, match="the first request of a document"):
        admission.check("", 100, 21.0 + 40.0, 21.0, "d3")


def test_requests_count_for_what_their_documents_computed_lately() -> None:
    admission = Admission(10_000)
    for number in range(10):
        admission.add([request(f"a{number}", 400, document="a")], 0.0)
        admission.record(output(f"a{number}", cached=380), 1.0)
    assert admission.work.tokens("a", 400) == pytest.approx(20 + ANSWER_TOKENS)
    assert admission.work.tokens("b", 400) == 400 + ANSWER_TOKENS
    assert admission.work.tokens("a", 10) == 10 + ANSWER_TOKENS


def test_time_is_left_for_the_answer_where_clients_wait_for_all_of_it() -> None:
    admission = queued(
        Admission(10_000),
        *(request(f"r{n}", 100, stream_interval=float("inf")) for n in range(120)),
    )
    for second in range(100):
        admission.record(output(f"r{second}"), second + 1.0)
        admission.record(output(f"r{second}", "stop"), second + 11.0)
    assert admission.expected_wait("") == pytest.approx(20.0)
    admission.check("", 10, 100.0 + 40.0, 100.0)
    with pytest.raises(QueueFullError, match="for a request that has 38 s"):
        admission.check("", 10, 100.0 + 38.0, 100.0)


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
