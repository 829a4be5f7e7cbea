"""Watchdog: only an engine that has work and says nothing hangs."""

from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.watchdog import Watchdog

TICKS = 4


def test_an_engine_hangs_after_four_silent_ticks_with_work() -> None:
    watchdog = Watchdog(60)
    assert watchdog.tick_seconds * TICKS == watchdog.seconds == 60
    assert [watchdog.tick(has_work=True) for _ in range(5)] == [False, False, False, True, True]


def test_whatever_it_sends_gives_it_all_its_time_again() -> None:
    watchdog = Watchdog(1)
    for _ in range(10):
        assert not any(watchdog.tick(has_work=True) for _ in range(TICKS - 1))
        watchdog.hear()
    assert not watchdog.tick(has_work=True)


@given(st.lists(st.sampled_from(["heard", "idle", "silent"])))
def test_it_hangs_where_the_last_four_events_were_silent_ticks(events: list[str]) -> None:
    watchdog = Watchdog(1)
    hangs = False
    for event in events:
        if event == "heard":
            watchdog.hear()
            hangs = False
        else:
            hangs = watchdog.tick(has_work=event == "silent")
    assert hangs == (len(events) >= TICKS and set(events[-TICKS:]) == {"silent"})
