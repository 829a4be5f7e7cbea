"""Progress where standard error is a log."""

import pytest

from midfill.cli.progress import progress_lines, show_progress


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
