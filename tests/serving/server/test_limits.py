"""Limits per tenant, against a clock that the test moves."""

import pytest

from midfill.errors import RateLimitError
from midfill.serving.server.limits import RateLimits, TenantLimits


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limited(clock: Clock, **limits: int) -> RateLimits:
    """Limits of the tenant "a"; others have none."""
    own = TenantLimits(**limits)
    return RateLimits(lambda tenant: own if tenant == "a" else TenantLimits(), clock)


def wait_of(refused: pytest.ExceptionInfo[RateLimitError]) -> int | None:
    return refused.value.retry_after


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one(clock: Clock) -> None:
    limits = limited(clock, requests=3)
    for _ in range(3):
        limits.count_request("a")
    for _ in range(2):  # refused ones don't count
        with pytest.raises(RateLimitError, match="limit is 3 requests per minute") as refused:
            limits.count_request("a")
        assert wait_of(refused) == 20
    limits.count_request("b")
    clock.now += 20
    limits.count_request("a")
    with pytest.raises(RateLimitError):
        limits.count_request("a")
    clock.now += 10_000  # no more than a minute's worth is saved
    for _ in range(3):
        limits.count_request("a")
    with pytest.raises(RateLimitError):
        limits.count_request("a")


def test_tokens_that_were_taken_beyond_the_limit_are_paid_back(clock: Clock) -> None:
    limits = limited(clock, tokens=60)
    with limits.generating("a", 50) as charge:
        charge.tokens = 5
    with limits.generating("a", 100) as charge:  # 5 are left
        charge.tokens = 10
    with pytest.raises(RateLimitError, match="60 tokens per minute; try again in 106 s") as refused:
        limits.generating("a", 1).__enter__()
    assert wait_of(refused) == 106
    with limits.generating("b", 10**6):
        pass
    clock.now += 105.5
    with pytest.raises(RateLimitError), limits.generating("a", 1):
        pass
    clock.now += 0.6
    with limits.generating("a", 1):
        pass


def test_an_answer_counts_as_running_until_it_ends_however_it_does(clock: Clock) -> None:
    limits = limited(clock, running=2)
    with limits.generating("a", 1):
        with pytest.raises(KeyError), limits.generating("a", 1):
            raise KeyError
        with limits.generating("a", 1):
            with pytest.raises(RateLimitError, match="limit is 2 requests at a time"):
                limits.generating("a", 1).__enter__()
            with limits.generating("b", 1):
                pass
        with limits.generating("a", 1):
            pass


def test_limits_that_change_apply_at_once(clock: Clock) -> None:
    own = TenantLimits()
    limits = RateLimits(lambda _: own, clock)
    for _ in range(100):
        limits.count_request("a")
        with limits.generating("a", 1000):
            pass
    own = TenantLimits(requests=1, tokens=10)
    limits.count_request("a")
    with pytest.raises(RateLimitError):
        limits.count_request("a")
    with limits.generating("a", 10):
        pass
    with pytest.raises(RateLimitError), limits.generating("a", 1):
        pass
    own = TenantLimits(requests=2)
    clock.now += 30
    limits.count_request("a")
    with limits.generating("a", 1):
        pass
