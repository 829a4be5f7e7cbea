"""OnlineFirst as a pure function: offline sequences run in steps of their own, and give way."""

import pytest
from schedule_states import CacheFacts, decoding, prefilling

from midfill.engine.scheduling.policies.background_prefill import BackgroundPrefill
from midfill.engine.scheduling.policies.online_first import OnlineFirst
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import (
    Chunk,
    Hints,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)

POLICY = OnlineFirst(BackgroundPrefill(SarathiServe(token_budget=32)), max_rows=12)
OFFLINE = Hints(offline=True)


def offline(sequence: RunningSequence) -> RunningSequence:
    return sequence._replace(hints=OFFLINE)


def plan(
    running: tuple[RunningSequence, ...] = (),
    waiting: tuple[WaitingSequence, ...] = (),
    background: tuple[WaitingSequence, ...] = (),
    policy: OnlineFirst = POLICY,
    max_rows: int | None = None,
    now: float = 0.0,
) -> StepPlan:
    state = ScheduleState(running, waiting, 1000, CacheFacts(), background, max_rows, now=now)
    return policy.plan(state)


def test_offline_sequences_run_where_nobody_waits() -> None:
    running = (offline(decoding(1)), offline(prefilling(2, 90)))
    assert plan(running) == StepPlan(decodes=(1,), chunks=(Chunk(2, 11),))


def test_a_step_with_their_prompts_is_short() -> None:
    waiting = (WaitingSequence(1, 90, hints=OFFLINE),)
    assert plan(waiting=waiting).admit == (Chunk(1, 12),)
    unlimited = OnlineFirst(SarathiServe(token_budget=32))
    assert plan(waiting=waiting, policy=unlimited).admit == (Chunk(1, 32),)
    online = (WaitingSequence(1, 90),)
    assert plan(waiting=online).admit == (Chunk(1, 32),)


def test_the_time_of_steps_that_others_wait_for_does_not_limit_them() -> None:
    unlimited = OnlineFirst(SarathiServe(token_budget=32))
    rows, online = (WaitingSequence(1, 90, hints=OFFLINE),), (WaitingSequence(1, 90),)
    assert plan(waiting=rows, policy=unlimited, max_rows=8).admit == (Chunk(1, 32),)
    assert plan(waiting=online, policy=unlimited, max_rows=8).admit == (Chunk(1, 8),)


def test_they_leave_before_anything_else_runs() -> None:
    rows = (offline(decoding(1)), offline(prefilling(2, 90)))
    leaves = StepPlan(preempt=(2, 1))  # so that the first is the first to come back
    assert plan(rows, (WaitingSequence(3, 40),)) == leaves
    assert plan((*rows, decoding(3))) == leaves
    assert plan(rows, background=(WaitingSequence(3, 40),)) == leaves


def test_they_stay_away_until_all_others_are_done() -> None:
    waiting = (WaitingSequence(1, 90, hints=OFFLINE),)
    assert plan((decoding(3),), waiting) == StepPlan(decodes=(3,))
    assert plan((prefilling(3, 8),), waiting) == StepPlan(chunks=(Chunk(3, 8),))
    background = (WaitingSequence(4, 20),)
    assert plan((), waiting, background) == StepPlan(background=(Chunk(4, 20),))


class TestWhoHasWaitedLong:
    """One sequence, the first to arrive, is planned like an online one."""

    NOW = POLICY.max_wait + 1.0

    def queued(self, sequence_id: int, arrived: float = 0.0) -> WaitingSequence:
        return WaitingSequence(sequence_id, 20, arrived=arrived, hints=OFFLINE)

    def test_is_admitted_before_others_that_wait(self) -> None:
        waiting = (WaitingSequence(3, 90), self.queued(1), self.queued(2))
        found = plan((decoding(4),), waiting, now=self.NOW)
        assert found == StepPlan(decodes=(4,), admit=(Chunk(1, 20), Chunk(3, 11)))
        assert plan((decoding(4),), waiting[1:], now=self.NOW - 2.0) == StepPlan(decodes=(4,))

    def test_stays_when_the_others_leave(self) -> None:
        rows = (offline(decoding(1)), offline(decoding(2)))
        assert plan((*rows, decoding(3)), now=self.NOW) == StepPlan(preempt=(2,))
        assert plan((rows[0], decoding(3)), now=self.NOW) == StepPlan(decodes=(1, 3))

    def test_is_the_first_to_arrive(self) -> None:
        late = offline(decoding(2))._replace(arrived=0.5)
        waiting = (self.queued(1, arrived=0.0),)
        assert plan((late, decoding(3)), waiting, now=self.NOW) == StepPlan(preempt=(2,))

    def test_is_planned_with_the_other_offline_ones_where_nobody_else_is_there(self) -> None:
        waiting = (self.queued(1), self.queued(2))
        assert plan(waiting=waiting, now=self.NOW) == plan(waiting=waiting)


@pytest.mark.parametrize("settings", [{"max_rows": 0}, {"max_wait": 0.0}, {"max_wait": -1.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|above 0"):
        OnlineFirst(SarathiServe(), **settings)
