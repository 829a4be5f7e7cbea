"""Progress where standard error is a log."""

import pytest
from processes import wait_for
from rich.console import Console

from midfill.cli.progress import StageLog, show_progress
from midfill.system.progress import STAGES_VARIABLE, Stage, stage_lines


class Log:
    """A log of stages whose seconds pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.lines: list[str] = []
        self.stages = StageLog(self.lines.append, lambda: self.seconds)

    def report(self, seconds: float, stage: str, done: int, total: int) -> None:
        self.seconds = seconds
        self.stages.report(stage, done, total)

    def tick(self, seconds: float) -> None:
        self.seconds = seconds
        self.stages.tick()


def test_a_log_gets_no_line_where_work_is_short() -> None:
    log = Log()
    log.report(0.1, "loading libraries", 0, 1)
    log.report(0.9, "reading weights", 5, 10)
    log.tick(1.9)
    assert not log.lines


def test_a_log_gets_a_line_when_a_stage_begins_and_every_five_seconds() -> None:
    log = Log()
    log.report(0.1, "downloading a model", 0, 50_000_000)
    log.report(2.5, "downloading a model", 5_000_000, 50_000_000)
    log.report(2.6, "downloading a model", 6_000_000, 50_000_000)
    log.report(2.7, "unpacking a model", 1, 2)  # is over at once
    log.report(2.8, "packing weights", 0, 4)
    log.report(3.2, "packing weights", 1, 4)
    log.report(3.3, "packing weights", 3, 4)
    log.report(8.2, "packing weights", 3, 4)
    assert log.lines == [
        "downloading a model: 4.77 MB of 47.7 MB",
        "packing weights: 25%",
        "packing weights: 75%",
    ]


def test_a_note_says_how_much_is_done() -> None:
    log = Log()
    log.stages.report("answering rows", 0, 9, "0 of 9 rows")
    log.seconds = 3.0
    log.stages.report("answering rows", 4, 9, "4 of 9 rows, 12 s left")
    assert log.lines == ["answering rows: 4 of 9 rows, 12 s left"]


def test_a_log_gets_a_line_when_it_is_known_how_much_is_to_be_done() -> None:
    log = Log()
    log.report(0.0, "downloading a model", 0, 0)
    log.tick(3.0)
    log.report(4.0, "downloading a model", 2_000_000, 50_000_000)
    log.report(4.1, "downloading a model", 9_000_000, 50_000_000)
    assert log.lines == ["downloading a model: 3 s", "downloading a model: 1.91 MB of 47.7 MB"]


def test_a_log_says_how_long_a_stage_takes_that_reports_nothing_meanwhile() -> None:
    log = Log()
    log.tick(3.0)  # there is nothing to say yet
    log.report(4.0, "compiling kernels", 0, 1)
    for tenths in range(40, 150):
        log.tick(tenths / 10)
    assert log.lines == ["compiling kernels", "compiling kernels: 5 s", "compiling kernels: 10 s"]


def test_a_log_gets_lines_in_its_own_format_while_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("midfill.cli.progress._QUIET_SECONDS", 0.02)
    monkeypatch.setattr("midfill.cli.progress._MIN_STAGE_SECONDS", 0.02)
    monkeypatch.setattr("midfill.cli.progress._TICK_SECONDS", 0.01)
    lines: list[str] = []
    with show_progress(lines.append) as report:
        report("loading", 1, 2)
        wait_for(lambda: bool(lines))
    assert lines == ["loading: 50%"]
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_each_stage_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(width=60, force_terminal=True)
    monkeypatch.setattr("rich.console.Console", lambda **_: terminal)
    with terminal.capture() as captured, show_progress() as report:
        report("downloading a model", 5_000_000, 50_000_000)
        report("compiling kernels", 0, 1)
    shown = captured.get()
    assert shown.rindex("downloading a model") < shown.rindex("compiling kernels")
    assert "4.77 MB of 47.7 MB" in shown


def test_a_program_that_has_started_this_one_reads_each_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STAGES_VARIABLE, "1")
    with show_progress() as report:
        report("loading libraries", 0, 1)
        report("reading weights", 1, 200)
        report("reading weights", 199, 200)
    read = [Stage.parse(line) for line in capsys.readouterr().out.splitlines()]
    assert [str(stage) for stage in read] == [
        "loading libraries",
        "reading weights: 0%",
        "reading weights: 99%",
    ]


def test_a_stage_is_written_when_it_changes() -> None:
    lines: list[str] = []
    report = stage_lines(lines.append)
    for done in (1, 1, 2, 400):
        report("downloading 1-2 of 3", done, 300)
    assert lines == ["stage 0 downloading 1-2 of 3", "stage 100 downloading 1-2 of 3"]
    assert Stage.parse("  listens  on http://127.0.0.1:1 (Ctrl-C stops it)") is None
