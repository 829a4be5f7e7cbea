"""Requests that nobody waits for any more: no step is spent on them."""

import math
import time

import pytest
from toy_engine import prompt, sampling, truth
from toy_runner import ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest
from midfill.engine.scheduling.admission import Deadlines
from serving import build_engine, check_idle, request, serve


class Clock:
    """``time`` with a ``monotonic`` that the test sets."""

    now = 1000.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def engine(clock: Clock, **options: int) -> Engine:
    return build_engine(ToyRunner(512), clock=clock, **options)


def asked(name: str, seconds: float, *, whole: bool = False, length: int = 40) -> EngineRequest:
    interval = math.inf if whole else 0.0
    return request(name, prompt(length), deadline=Clock.now + seconds, stream_interval=interval)


def reasons(one: Engine) -> dict[str, str]:
    return {output.request_id: output.finish_reason for output in one.step()}  # type: ignore[misc]


def test_a_request_that_has_waited_for_too_long_is_not_started(clock: Clock) -> None:
    one = engine(clock)
    one.add(asked("late", 1.0))
    clock.now += 1.0
    assert reasons(one) == {"late": "expired"}
    assert one.stats().computed_tokens == 0
    check_idle(one)


def test_one_in_prefill_is_not_continued_and_what_it_has_computed_stays(clock: Clock) -> None:
    one = engine(clock, token_budget=16)
    one.add(asked("late", 1.0))
    one.step()
    clock.now += 2.0
    assert reasons(one) == {"late": "expired"}
    check_idle(one)
    answers = serve(one, [request("again", prompt(40))])
    assert answers["again", 0].cached_tokens == 16
    assert answers["again", 0].tokens == truth(prompt(40))


@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_that_has_begun_continues_if_it_is_streamed(clock: Clock, whole: bool) -> None:
    one = engine(clock)
    one.add(asked("begun", 1.0, whole=whole))
    one.step()
    clock.now += 2.0
    assert reasons(one) == {"begun": "expired" if whole else None}


def test_the_others_are_not_affected(clock: Clock) -> None:
    one = engine(clock, max_running=1)
    one.add(asked("first", 100.0))
    one.add(asked("late", 1.0, length=30))
    one.add(asked("last", 100.0, length=20))
    one.step()
    clock.now += 2.0
    answers = serve(one)
    assert answers["late", 0].finish_reason == "expired"
    assert answers["first", 0].finish_reason == answers["last", 0].finish_reason == "length"
    assert answers["last", 0].tokens == truth(prompt(20))


def test_all_answers_of_a_request_end(clock: Clock) -> None:
    one = engine(clock)
    request_of_three = request(
        "a", prompt(40), sampling(n=3), deadline=clock.now + 1, stream_interval=math.inf
    )
    one.add(request_of_three)
    one.step()
    one.step()
    clock.now += 2.0
    outputs = one.step()
    assert [(one.index, one.finish_reason) for one in outputs] == [
        (index, "expired") for index in range(3)
    ]
    check_idle(one)


def test_deadlines_of_finished_requests_take_no_memory() -> None:
    unfinished: set[str] = set()
    deadlines = Deadlines(unfinished.__contains__)
    for number in range(10_000):
        deadlines.add(asked(f"r{number}", 600.0))
    assert len(deadlines) <= 65
    unfinished.add("r9999")
    deadlines.add(asked("r9999", 1.0))
    assert [one.request_id for one in deadlines.take_expired(Clock.now + 5)] == ["r9999"]
