"""EngineProcess: one that was started ahead; Watchdog: an engine that is silent for long hangs."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import is_running, wait_for

from midfill.engine.messages import FromEngine, Loading
from midfill.engine.process.supervision import EngineProcess, Watchdog, describe_exit
from midfill.errors import MidfillError


def test_a_process_that_was_started_in_vain_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = EngineProcess.spawn()
    assert is_running(process.process_id)
    assert list(tmp_path.iterdir())
    process.discard()
    wait_for(lambda: not is_running(process.process_id))
    assert not list(tmp_path.iterdir())


def test_signals_to_a_process_that_has_just_begun_leave_its_end_to_the_server() -> None:
    """Supervisors and terminals signal all of a server's processes."""
    process = EngineProcess.spawn()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.process_id, number)

    async def first_message() -> FromEngine | None:
        async for message in process.received():
            return message
        return None

    async def started() -> FromEngine | None:
        message = await first_message()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(process.process_id, number)
        await process.close()
        return message

    assert isinstance(asyncio.run(started()), Loading)
    assert process.exit_status == 0  # of a process whose input has ended


def test_one_that_cant_be_started_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)  # longer than the name of a socket may be
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(MidfillError, match=r"can't be started: .*; TMPDIR names"):
        EngineProcess.spawn()
    assert not list(long.iterdir())


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "exit status 1"),
        (-9, "SIGKILL, perhaps because memory ran out"),
        (-4, "SIGILL: the chip lacks an instruction; are NUMBA_CPU_NAME"),
        (-11, "SIGSEGV"),
        (-50, "signal 50"),
    ],
)
def test_how_a_process_ended_is_said_in_words(status: int, words: str) -> None:
    assert describe_exit(status).startswith(words)


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
