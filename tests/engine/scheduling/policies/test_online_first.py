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
) -> StepPlan:
    state = ScheduleState(running, waiting, 1000, CacheFacts(), background, max_rows)
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


def test_a_step_has_at_least_one_row() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        OnlineFirst(SarathiServe(), max_rows=0)
