"""OrderedAdmission, and what holds under every registered policy: nothing waits for ever."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding
from step_simulation import LAYERS, Job, Simulation

from midfill.config import ModelOptions
from midfill.engine.loading import scheduler_policy
from midfill.engine.scheduling.policies.earliest_deadline import EarliestDeadlineFirst
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.priority import PriorityOrder
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.policies.shortest_first import ShortestPromptFirst
from midfill.engine.scheduling.registry import POLICIES
from midfill.engine.scheduling.scheduler import (
    Hints,
    SchedulerPolicy,
    ScheduleState,
    WaitingSequence,
)

ORDERS = [name for name, entry in POLICIES.items() if entry.kind == "order"]
BATCHINGS = [name for name, entry in POLICIES.items() if entry.kind != "order"]
MAX_WAIT = 3.0


def composed(specification: str, budget: int = 16, max_running: int = 4) -> SchedulerPolicy:
    options = ModelOptions(scheduler=specification, token_budget=budget, max_running=max_running)
    return scheduler_policy(options, LAYERS)


def admitted(policy: SchedulerPolicy, waiting: list[WaitingSequence], now: float) -> list[int]:
    state = ScheduleState((), tuple(waiting), 10_000, CacheFacts(), now=now)
    return [chunk.sequence_id for chunk in policy.plan(state).admit]


class TestStarvation:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("batching", BATCHINGS)
    def test_a_request_that_every_order_puts_last_runs_in_bounded_time(
        self, batching: str, order: str
    ) -> None:
        # Twice as many requests as can be answered: shorter, cached, urgent and important ones.
        # They all have come later than the one that nobody would choose.
        others = [
            Job(0.01 + 0.02 * n, 32, 2, 16, hints=Hints(priority=-1, deadline=100.0))
            for n in range(1000)
        ]
        victim = Job(0.0, 200, 2, hints=Hints(priority=5))
        first = [Job(0.0, 32, 30, 16, hints=Hints(priority=-1)) for _ in range(4)]
        policy = composed(f"{batching}+{order}:max_wait={MAX_WAIT}")
        simulation = Simulation(policy, slots=400, max_running=4)
        jobs = simulation.run([*first, victim, *others], until=12.0)
        assert jobs[4].ttft < MAX_WAIT + 3.0
        assert simulation.waiting, "the load was too small to say anything"

    @settings(max_examples=40, deadline=None)
    @given(
        st.sampled_from([*itertools.product(BATCHINGS, ORDERS), *((b, "") for b in BATCHINGS)]),
        st.lists(
            st.builds(
                Job,
                st.floats(0, 5),
                st.integers(1, 60),
                st.integers(1, 20),
                st.just(0),
                st.sampled_from(["", "b"]),
                st.builds(Hints, st.integers(-3, 3), st.floats(1, 50), st.integers(1, 30)),
            ),
            min_size=1,
            max_size=25,
        ),
        st.integers(80, 200),
        st.integers(1, 40),
    )
    def test_all_requests_end_however_few_slots_there_are(
        self, names: tuple[str, str], jobs: list[Job], slots: int, budget: int
    ) -> None:
        policy = composed("+".join(filter(None, names)), budget)
        simulation = Simulation(policy, slots, max_running=4)
        done = simulation.run(jobs)
        assert [len(each.token_times) for each in done] == [each.job.answer for each in done]

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_clock_that_stands_still_or_jumps_changes_no_answer(self, order: str) -> None:
        policy = composed(order)
        queue = [WaitingSequence(n, 10, arrived=float(n)) for n in range(3)]
        for now in (-1e9, 0.0, 1e18):
            assert sorted(admitted(policy, queue, now)) == [0, 1]


class TestOrder:
    policy = OrderedAdmission(SarathiServe(), ShortestPromptFirst(ageing=0.0, max_wait=10.0))

    def test_the_batching_policy_sees_the_sorted_queue(self) -> None:
        queue = [WaitingSequence(1, 30), WaitingSequence(2, 10), WaitingSequence(3, 20)]
        assert admitted(self.policy, queue, 0.0) == [2, 3, 1]

    def test_whoever_has_waited_too_long_comes_first_by_arrival(self) -> None:
        queue = [
            WaitingSequence(1, 30, arrived=1.0),
            WaitingSequence(2, 40, arrived=0.5),
            WaitingSequence(3, 5, arrived=5.0),
        ]
        assert admitted(self.policy, queue, 11.5) == [2, 1, 3]

    def test_what_has_run_before_comes_before_what_is_new(self) -> None:
        queue = [WaitingSequence(2, 30, resumed=True), WaitingSequence(3, 10)]
        assert admitted(self.policy, queue, 0.0) == [2, 3]
        by_priority = OrderedAdmission(SarathiServe(), PriorityOrder())
        more_important = [queue[0], queue[1]._replace(hints=Hints(priority=-1))]
        assert admitted(by_priority, more_important, 0.0) == [3, 2]

    def test_tenants_keep_their_turns(self) -> None:
        queue = [
            WaitingSequence(1, 30, tenant="a"),
            WaitingSequence(2, 20, tenant="b"),
            WaitingSequence(3, 10, tenant="a"),
            WaitingSequence(4, 5, tenant="b"),
        ]
        assert admitted(self.policy, queue, 0.0) == [3, 4, 1, 2]

    @pytest.mark.parametrize(
        ("policy", "urgent"),
        [
            (PriorityOrder(), Hints(priority=-1)),
            (EarliestDeadlineFirst(), Hints(deadline=1.0)),
        ],
    )
    def test_the_last_in_order_is_preempted_first(
        self, policy: PriorityOrder, urgent: Hints
    ) -> None:
        running = tuple(decoding(n)._replace(hints=urgent if n == 2 else Hints()) for n in range(3))
        state = ScheduleState(running, (), 1, CacheFacts(held={1: 50}))
        assert OrderedAdmission(SarathiServe(), policy).plan(state).preempt == (1,)

    def test_a_sequence_that_has_waited_too_long_is_not_preempted_for_others(self) -> None:
        old = decoding(0)._replace(arrived=0.0, hints=Hints(priority=9))
        new = decoding(1)._replace(arrived=70.0)
        state = ScheduleState((old, new), (), 1, CacheFacts(held={1: 50}), now=80.0)
        assert OrderedAdmission(SarathiServe(), PriorityOrder()).plan(state).preempt == (1,)

    def test_a_wait_of_no_time_is_refused(self) -> None:
        with pytest.raises(ValueError, match="max_wait must be above 0"):
            PriorityOrder(max_wait=0.0)
