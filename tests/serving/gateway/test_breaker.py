"""When a server that fails is spared, and when it is tried again."""

from midfill.serving.gateway.breaker import Breaker


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened() -> tuple[Breaker, Clock]:
    """Return a breaker after three failures."""
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        assert breaker.allows
        breaker.record_sent()
        breaker.record_failure()
    return breaker, clock


def test_three_failures_in_a_row_open_it() -> None:
    breaker, _ = opened()
    assert breaker.state == "open"
    assert not breaker.allows
    assert breaker.retry_after == 1.0


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(Clock())
    for _ in range(5):
        breaker.record_failure()
        breaker.record_failure()
        breaker.record_success()
    assert breaker.state == "closed"


def test_after_a_while_one_request_may_try() -> None:
    breaker, clock = opened()
    clock.now += 1
    assert breaker.state == "half-open"
    assert breaker.allows
    breaker.record_sent()
    assert not breaker.allows
    breaker.record_success()
    assert breaker.state == "closed"


def test_each_failed_trial_doubles_the_time_up_to_30_seconds() -> None:
    breaker, clock = opened()
    waits = []
    for _ in range(7):
        waits.append(breaker.retry_after)
        clock.now += breaker.retry_after
        breaker.record_sent()
        breaker.record_failure()
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_a_trial_that_is_cancelled_leaves_room_for_another() -> None:
    breaker, clock = opened()
    clock.now += 1
    breaker.record_sent()
    breaker.record_given_up()
    assert breaker.allows


def test_requests_that_were_sent_before_it_opened_do_not_prolong_it() -> None:
    breaker, _ = opened()
    breaker.record_failure()
    breaker.record_failure()
    assert breaker.retry_after == 1.0
