"""Programs: what is learned of chains of requests, beside naive sums over all of them."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.scheduling.programs import (
    Durations,
    FinishedTurn,
    Programs,
    Progress,
    RebuildCost,
)
from midfill.engine.scheduling.scheduler import ProgramId
from midfill.engine.scheduling.step_cost import StepCost

A, B = ProgramId("", "a"), ProgramId("", "b")


def programs() -> Programs:
    return Programs(RebuildCost(StepCost(), 16))


def turn(of: Programs, program: ProgramId, tool: str, now: float) -> FinishedTurn:
    found = of.finish_turn(program, tool, 100, now, last_step=False)
    assert found is not None
    return found


class TestProgress:
    def test_three_turns_of_one_program(self) -> None:
        progress = Progress()
        assert progress.weight == 1.0
        progress.add(3)  # (1, 2), (2, 1), (3, 0)
        assert progress.weight == pytest.approx(1.0)

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    def test_it_is_minus_the_correlation(self, turns: list[int]) -> None:
        progress = Progress()
        for count in turns:
            progress.add(count)
        pairs = [(k, count - k) for count in turns for k in range(1, count + 1)]
        done, left = zip(*pairs, strict=True)
        if len(set(done)) > 1 and len(set(left)) > 1:
            expected = -statistics.correlation(done, left)
            assert progress.weight == pytest.approx(expected, abs=1e-6)
        else:
            assert progress.weight == 1.0


def test_a_tool_s_time_is_from_the_turn_s_end_to_the_next_request() -> None:
    one = programs()
    one.record_arrival(A, 0.0)
    assert not turn(one, A, "grep", 2.0).tool_durations
    one.record_arrival(A, 5.0)
    one.record_arrival(B, 5.5)
    turn(one, B, "make", 6.0)
    one.record_arrival(B, 7.0)
    found = turn(one, A, "grep", 8.0)
    assert list(found.tool_durations) == [3.0]
    assert list(found.durations) == [1.0, 3.0]


def test_queue_delays_count_only_follow_ups_whose_kv_was_not_kept() -> None:
    one = programs()
    one.record_arrival(A, 0.0)
    one.record_admission(A, 9.0, retained=False)  # its first turn
    assert turn(one, A, "x", 2.0).queue_delay == 0.0
    one.record_admission(A, 4.0, retained=False)
    one.record_admission(A, 7.0, retained=True)
    one.record_admission(A, 2.0, retained=False)
    found = turn(one, A, "x", 3.0)
    assert found.queue_delay == 3.0
    assert found.benefit == 3.0 * found.progress_weight


def test_the_arrival_is_the_program_s_and_the_end_clears_its_state() -> None:
    one = programs()
    assert one.record_arrival(A, 1.0) == 1.0
    turn(one, A, "x", 2.0)
    assert one.record_arrival(A, 3.0) == 1.0
    assert one.finish_turn(A, "x", 10, 4.0, last_step=True) is None
    assert len(one) == 0
    assert one.record_arrival(A, 9.0) == 9.0
    assert list(turn(one, A, "x", 10.0).durations) == [1.0]  # not from 4.0 to 9.0


def test_a_turn_without_a_tool_has_nothing_to_wait_for() -> None:
    one = programs()
    one.record_arrival(A, 0.0)
    assert one.finish_turn(A, "", 10, 1.0, last_step=False) is None
    one.record_arrival(A, 5.0)
    assert not turn(one, A, "x", 6.0).durations
    assert one.finish_turn(B, "x", 10, 1.0, last_step=False) is None  # unknown


def test_programs_tools_and_durations_are_bounded() -> None:
    one = programs()
    for number in range(5000):
        one.record_arrival(ProgramId("", str(number)), 0.0)
    assert len(one) == 4096
    durations = Durations()
    for number in range(1500):
        durations.add(float(-number))
    assert durations.ascending == [float(-number) for number in range(1499, 499, -1)]


def test_the_cost_of_rebuilding_grows_faster_than_the_text() -> None:
    cost = RebuildCost(StepCost(), 64)
    assert cost.seconds(1000) == 0.0  # nothing is known yet
    for _ in range(20):
        for keys in (100, 1000, 4000, 16000):
            cost.record_step(64, keys, 0.01 + 1e-5 * keys)
    times = [cost.seconds(tokens) for tokens in (64, 1000, 4000, 16000)]
    assert times == sorted(times)
    assert times[3] / times[1] > 16
    assert cost.seconds(0) == 0.0
