"""What policies see: the engine tells them the time, the slots in use and what clients say."""

from hypothesis import given
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling
from toy_engine import prompt
from toy_runner import ToyRunner

from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy
from midfill.engine.request import EngineRequest, EngineSamplingParams, RequestHints
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import (
    Hints,
    ProgramId,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)


class Watch:
    """A policy that keeps the states that it was shown, and a clock that the test sets."""

    def __init__(self) -> None:
        self.time = 100.0
        self.states: list[ScheduleState] = []

    def plan(self, state: ScheduleState) -> StepPlan:
        self.states.append(state)
        return SarathiServe(token_budget=16, max_running=1).plan(state)

    def monotonic(self) -> float:
        return self.time

    def perf_counter(self) -> float:
        return self.time

    def engine(self, lookahead: int = 8) -> Engine:
        options = EngineOptions(max_running=1, lookahead=lookahead)
        return Engine(ToyRunner(128), (), options, policy=self, clock=self)


def asked(name: str, **fields: object) -> EngineRequest:
    params = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    given = {"token_ids": prompt(20), "sampling": params} | fields
    return EngineRequest(request_id=name, **given)


def test_a_policy_sees_time_arrivals_hints_and_slots() -> None:
    watch = Watch()
    one = watch.engine()
    hints = RequestHints(priority=3, expected_tokens=5, program="job", last_step=True)
    one.add(asked("a", hints=hints, deadline=200.0, tenant="us"))
    watch.time = 101.5
    one.step()
    one.step()
    first, second = watch.states
    seen = Hints(3, 200.0, 5, ProgramId("us", "job"), 100.0, True)
    assert (first.now, first.total_slots, first.used_slots) == (101.5, 128, 0)
    assert first.waiting == (WaitingSequence(0, 20, tenant="us", arrived=100.0, hints=seen),)
    assert second.used_slots == 20
    assert (second.running[0].arrived, second.running[0].hints) == (100.0, seen)


def test_expectations_are_clamped_to_what_the_request_allows() -> None:
    watch = Watch()
    one = watch.engine()
    for name, expected in (("a", 0), ("b", 10**9), ("c", None)):
        one.add(asked(name, hints=RequestHints(expected_tokens=expected)))
    one.step()
    assert [each.hints.expected_tokens for each in watch.states[0].waiting] == [1, 8, None]


def test_where_the_clock_is_set_back_time_stands_still() -> None:
    watch = Watch()
    one = watch.engine()
    one.add(asked("a"))
    one.step()
    watch.time = 5.0
    one.add(asked("b"))
    one.step()
    assert [state.now for state in watch.states] == [100.0, 100.0]
    assert watch.states[-1].waiting[0].arrived == 100.0


def test_a_deadline_of_long_ago_ends_its_request_alone() -> None:
    watch = Watch()
    one = watch.engine()
    one.add(asked("late", deadline=-1e300))
    one.add(asked("a", deadline=1e300))
    assert [output.finish_reason for output in one.step()] == ["expired"]
    assert len(watch.states[0].waiting) == 1


def test_a_policy_sees_more_of_the_queue_than_it_can_admit_if_it_asks() -> None:
    for lookahead, seen in ((0, 1), (3, 3), (99, 5)):
        watch = Watch()
        one = watch.engine(lookahead)
        for name in "abcde":
            one.add(asked(name))
        one.step()
        assert len(watch.states[0].waiting) == seen


@given(
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 5),
    st.lists(st.integers(-5, 5), min_size=5, max_size=5), st.floats(0, 1e6), st.integers(0, 300),
)  # fmt: skip
def test_the_default_policy_plans_as_if_there_were_no_hints(
    decodes: int, prompts: int, queued: int, priorities: list[int], now: float, slots: int
) -> None:
    running = [decoding(n, 30 + n) for n in range(decodes)]
    running += [prefilling(10 + n, 60 * (n + 1), n) for n in range(prompts)]
    waiting = [WaitingSequence(20 + n, 40 * (n + 1)) for n in range(queued)]
    hinted = [Hints(priority, now + priority, 1 + abs(priority)) for priority in priorities]
    options = ModelOptions()
    policy = scheduler_policy(options, 4)
    chunked = SarathiServe(options.step_tokens, options.max_running, short_share=0.5)
    plain = ScheduleState(tuple(running), tuple(waiting), slots, CacheFacts())
    told = ScheduleState(
        tuple(
            each._replace(arrived=now, hints=hints)
            for each, hints in zip(running, [*hinted, *hinted], strict=False)
        ),
        tuple(
            each._replace(tenant="a", arrived=-now, hints=hints)
            for each, hints in zip(waiting, hinted, strict=False)
        ),
        slots, CacheFacts(), now=now, total_slots=1000,
    )  # fmt: skip
    assert policy.plan(told) == policy.plan(plain) == chunked.plan(plain)
