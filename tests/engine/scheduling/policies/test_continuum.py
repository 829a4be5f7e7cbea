"""Continuum as a pure function: the time to live, the order, and which pins end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding

from midfill.engine.scheduling.policies.continuum import (
    Continuum,
    best_time_to_live,
    cold_start_time_to_live,
)
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.programs import FinishedTurn
from midfill.engine.scheduling.scheduler import (
    Hints,
    Pin,
    ProgramId,
    RunningSequence,
    ScheduleState,
    WaitingSequence,
)


def program(name: str) -> ProgramId:
    return ProgramId("", name)


def ended(
    tool: list[float], other: list[float] | None = None, benefit: float = 3.0, name: str = "x"
) -> FinishedTurn:
    return FinishedTurn(name, sorted(tool), sorted(other or []), 0.0, 1.0, benefit)


def waiting(number: int, name: str, arrived: float, length: int = 10) -> WaitingSequence:
    hints = Hints(program=program(name), program_arrived=arrived)
    return WaitingSequence(number, length, arrived=10.0 + number, hints=hints)


def state(
    queue: list[WaitingSequence],
    pins: list[Pin],
    running: tuple[RunningSequence, ...] = (),
    available: int = 1000,
) -> ScheduleState:
    facts = CacheFacts()
    return ScheduleState(running, tuple(queue), available, facts, now=20.0, pins=tuple(pins))


class TestTimeToLive:
    @given(
        st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=1, max_size=12),
        st.integers(-20, 80).map(lambda n: n / 8),
    )
    def test_no_other_time_is_better_on_a_fine_grid(
        self, durations: list[float], benefit: float
    ) -> None:
        def value(tau: float) -> float:
            share = sum(each <= tau for each in durations) / len(durations)
            return share * benefit - tau

        found = best_time_to_live(sorted(durations), benefit)
        best = max(value(step / 16) for step in range(100))
        assert value(found) == pytest.approx(best)
        assert found == min(t for t in (0.0, *durations) if value(t) == pytest.approx(best))

    def test_examples(self) -> None:
        assert best_time_to_live([1.0, 4.0], 3.0) == 1.0 * (3.0 / 2 > 1.0)
        assert cold_start_time_to_live(3.0) == math.log(3.0)
        assert cold_start_time_to_live(1.0) == cold_start_time_to_live(-5.0) == 0.0

    def test_the_source_changes_with_the_number_of_samples(self) -> None:
        policy = Continuum()
        fast, slow = [0.5] * 100, [2.0] * 101
        assert policy.time_to_live(ended(fast, fast)) == math.log(3.0)
        assert policy.time_to_live(ended(fast, slow)) == 2.0
        assert policy.time_to_live(ended([*fast, 0.5], slow)) == 0.5

    def test_without_a_tool_nothing_is_kept(self) -> None:
        assert Continuum().time_to_live(ended([1.0] * 200, name="")) == 0.0

    def test_the_simple_rule_keeps_fast_and_unknown_tools(self) -> None:
        policy = Continuum(threshold=2.0)
        assert policy.time_to_live(ended([])) == 2.0
        assert policy.time_to_live(ended([1.0, 3.0])) == 2.0
        assert policy.time_to_live(ended([1.0, 60.0])) == 0.0

    @pytest.mark.parametrize(
        "options", [{"min_samples": -1}, {"threshold": -1.0}, {"max_pinned": 0}]
    )
    def test_options_out_of_range_are_refused(self, options: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="must be at least 0, max_pinned above 0"):
            Continuum(**options)  # type: ignore[arg-type]


class TestOrder:
    policy = OrderedAdmission(SarathiServe(), Continuum())

    def test_programs_come_in_the_order_of_their_first_requests(self) -> None:
        queue = [waiting(1, "new", 11.0), waiting(2, "old", 0.0)]
        assert [chunk.sequence_id for chunk in self.policy.plan(state(queue, [])).admit] == [2, 1]

    def test_preempted_then_pinned_then_the_others(self) -> None:
        queue = [
            waiting(1, "old", 0.0),
            waiting(2, "pinned", 5.0),
            waiting(3, "run before", 9.0)._replace(resumed=True),
        ]
        pins = [Pin(program("pinned"), 30.0, 5.0, 10)]
        admitted = [chunk.sequence_id for chunk in self.policy.plan(state(queue, pins)).admit]
        assert admitted == [3, 2, 1]

    def test_the_latest_program_is_preempted_first(self) -> None:
        running = tuple(
            decoding(number)._replace(arrived=9.0, hints=Hints(program_arrived=arrived))
            for number, arrived in ((1, 2.0), (2, 8.0), (3, 4.0))
        )
        short = ScheduleState(running, (), 2, CacheFacts(held={2: 50}), now=10.0)
        assert self.policy.plan(short).preempt == (2,)


class TestRelease:
    policy = Continuum()

    def test_pins_that_are_due_are_released_unless_their_follow_up_waits(self) -> None:
        pins = [
            Pin(program("due"), 20.0, 1.0, 10),
            Pin(program("awaited"), 19.0, 1.0, 10, awaited=True),
            Pin(program("young"), 21.0, 1.0, 10),
        ]
        assert self.policy.release(state([], pins)) == (program("due"),)
        assert self.policy.release(state([], pins[1:])) == ()

    def test_where_nothing_runs_and_the_head_does_not_fit_the_latest_program_s_pin_goes(
        self,
    ) -> None:
        pins = [Pin(program(name), 99.0, arrived, 10) for name, arrived in (("a", 1.0), ("b", 2.0))]
        queue = [waiting(1, "c", 0.0, length=100)]
        assert self.policy.release(state(queue, pins, available=99)) == (program("b"),)
        assert self.policy.release(state(queue, pins, available=100)) == ()
        assert self.policy.release(state(queue, pins, (decoding(0),), available=99)) == ()

    def test_decodes_without_slots_end_pins_before_anything_is_preempted(self) -> None:
        pins = [Pin(program("a"), 99.0, 1.0, 10)]
        running = (decoding(0), decoding(1))
        assert self.policy.release(state([], pins, running, available=1)) == (program("a"),)
        assert self.policy.release(state([], pins, running, available=2)) == ()
