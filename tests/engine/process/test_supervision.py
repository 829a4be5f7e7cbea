"""Watchdog: an engine that says nothing for long enough hangs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.process.supervision import Watchdog


@pytest.mark.parametrize("seconds", [0.1, 1, 4, 19.9, 20, 22, 120])
def test_an_engine_hangs_when_it_has_been_silent_for_so_long(seconds: float) -> None:
    watchdog = Watchdog(seconds)
    ticks = 1
    while not watchdog.tick():
        ticks += 1
    # The first tick may follow at once on the last word.
    assert (ticks - 1) * watchdog.tick_seconds >= 0.75 * seconds - 1e-9
    assert (ticks - 1) * watchdog.tick_seconds <= seconds
    assert watchdog.tick_seconds <= 5


def test_one_that_is_merely_slow_is_late() -> None:
    watchdog = Watchdog(120)
    assert not watchdog.tick()
    assert not watchdog.late
    assert not watchdog.tick()
    assert watchdog.late
    watchdog.hear()
    assert not watchdog.late


@given(st.lists(st.sampled_from(["heard", "silent"])))
def test_it_hangs_where_the_last_four_events_were_silent_ticks(events: list[str]) -> None:
    watchdog = Watchdog(1)
    hangs = False
    for event in events:
        if event == "heard":
            watchdog.hear()
            hangs = False
        else:
            hangs = watchdog.tick()
    assert hangs == (len(events) >= 4 and set(events[-4:]) == {"silent"})
