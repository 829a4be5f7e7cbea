"""Progress where standard error is a log."""

import pytest

from midfill.cli.progress import progress_lines, show_progress
from midfill.system.progress import STAGES_VARIABLE, Stage, stage_lines


def test_a_log_gets_a_line_every_ten_seconds_and_none_where_work_is_short() -> None:
    now = [0.0]
    lines: list[str] = []
    report = progress_lines(lines.append, lambda: now[0])
    for seconds, done in ((0.1, 1), (9.0, 1), (10.5, 2), (11.0, 3), (20.0, 4)):
        now[0] = seconds
        report("packing weights", done, 4)
    assert lines == ["packing weights: 50%"]
    now[0] = 21.0
    report("loading", 5, 0)
    assert lines[1:] == ["loading"]


def test_a_log_gets_them_in_its_own_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("midfill.cli.progress._LINE_SECONDS", 0.0)
    lines: list[str] = []
    with show_progress(lines.append) as report:
        report("loading", 1, 2)
    assert lines == ["loading: 50%"]
    assert capsys.readouterr().err == ""


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
