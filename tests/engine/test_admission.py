"""Admission: which requests may be queued."""

import pytest

from midfill.engine.admission import Admission, QueueSpeed
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import QueueFullError


def request(name: str, tokens: int, tenant: str = "") -> EngineRequest:
    return EngineRequest(
        request_id=name, token_ids=[1] * tokens, sampling=EngineSamplingParams(), tenant=tenant
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
        admission.remove(f"r{second}", second + 1.0, answered=True)
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
        admission.remove(f"r{number}", 5.0, answered=False)
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
    admission.remove("a", 1.0, answered=True)
    admission.remove("a", 1.0, answered=True)
    admission.remove("b", 1.0, answered=False)
    assert admission.queued_tokens == 0
    queued(admission, request("c", 50))
    admission.clear()
    assert admission.queued_tokens == 0
    admission.check("", 1000, None, 2.0)
