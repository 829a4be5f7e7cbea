"""Carets far from what they need, asked with several windows and methods."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError, MidfillError
from midfill_lab.evaluation.far import (
    FarOptions,
    FarReport,
    draw_far_files,
    far_conditions,
    load_far_files,
    measure_far,
    read_far,
)
from midfill_lab.evaluation.models import ModelChoice
from midfill_lab.evaluation.reuse_session import ReuseSession
from midfill_lab.evaluation.source_files import SourceFile

HIP = "hip:k=64,window=64,dense_layers=0"
OPTIONS = FarOptions(
    windows=("200/100", "800/100"), methods=(HIP,), limit=4, per_file=2, timed=1, max_tokens=4,
    shortest=1000, longest=9000,
)  # fmt: skip
CONDITIONS = ["200/100", "800/100", f"800/100, {HIP}"]


def source(name: str) -> SourceFile:
    lines = [f"{name}_{i} = compute({i * 7919 % 1000})" for i in range(80)]
    uses = [f"print({name}_{i})" for i in range(20, 23)]
    return SourceFile(f"{name}.py", "\n".join([f"def {name}_far(): ...", *lines, *uses, ""]))


FILES = [source("alpha"), source("beta"), source("gamma")]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReuseSession]:
    folder: Path = tmp_path_factory.mktemp("tiny") / "long"
    write_tiny("llama", folder, max_position_embeddings=8192)
    session = ReuseSession(ModelChoice(model=str(folder), threads=1))
    yield session
    session.close()


def measured(
    session: ReuseSession, earlier: FarReport | None = None, options: FarOptions = OPTIONS
) -> tuple[FarReport, list[bytes]]:
    """A run's report, and what was saved on the way."""
    saved: list[bytes] = []
    report = measure_far(
        session, "tiny", draw_far_files(FILES, options), options, lambda *_: None,
        lambda report: saved.append(msgspec.json.encode(report)), earlier,
    )  # fmt: skip
    return report, saved


@pytest.fixture(scope="module")
def report(session: ReuseSession) -> FarReport:
    found, saved = measured(session)
    assert len(saved) == len(found.done) == 2, "after each file"
    return found


def test_every_caret_is_asked_in_every_condition(report: FarReport) -> None:
    assert [list(caret.answers) for caret in report.carets] == [CONDITIONS] * len(report.carets)
    assert {caret.kind for caret in report.carets} == {"far", "any"}
    assert sum(caret.kind == "far" for caret in report.carets) == OPTIONS.limit


def test_a_wider_window_shows_more(report: FarReport) -> None:
    for caret in report.carets:
        small, wide, part = (caret.answers[name].tokens for name in CONDITIONS)
        assert part == wide >= small
        if caret.kind == "far":
            assert caret.distance > 400
            assert wide > 2 * small


def test_a_first_prompt_costs_more_than_the_next_one(report: FarReport) -> None:
    assert [time.condition for time in report.times] == CONDITIONS, "of one file"
    for time in report.times:
        assert 0 < time.typed < time.cold
    _, wide, part = report.times
    assert (part.cold, part.typed) == (wide.cold, wide.typed), "the prompt is the same"


def test_lines_are_counted_in_the_files_that_were_asked(report: FarReport) -> None:
    drawn = draw_far_files(FILES, OPTIONS)
    for kind in ("far", "any"):
        assert report.lines[kind] == sum(file.lines[kind] for file in drawn) > 0


def test_files_that_are_imported_take_what_a_window_has_more(session: ReuseSession) -> None:
    other = SourceFile("other.py", 30 * "# filler\n" + "def first_thing(): ...\n")
    text = "import other\n" + 10 * "count = 0\n" + "print(other.first_thing())\n"
    options = msgspec.structs.replace(OPTIONS, shortest=100, timed=0)
    files = draw_far_files([SourceFile("own.py", text), other], options)
    found = measure_far(session, "tiny", files, options, lambda *_: None, lambda _: None)
    (caret,) = [caret for caret in found.carets if caret.kind == "imported"]
    assert caret.name == "first_thing"
    assert caret.answers["800/100"].tokens > caret.answers["200/100"].tokens


def test_an_interrupted_run_goes_on_where_it_was(session: ReuseSession, report: FarReport) -> None:
    _, saved = measured(session)
    first = msgspec.json.decode(saved[0], type=FarReport)
    resumed, again = measured(session, first)
    assert len(again) == 1
    assert resumed.carets == report.carets
    assert resumed.lines == report.lines
    other = msgspec.structs.replace(OPTIONS, seed=1)
    with pytest.raises(MidfillError, match="can't be resumed: its options differ"):
        measured(session, first, other)
    first.carets[0] = msgspec.structs.replace(first.carets[0], digest="0")
    with pytest.raises(MidfillError, match="can't be resumed: its carets are in other files"):
        measured(session, first)


def test_nonsense_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match="there is nothing to choose from"):
        far_conditions(("200/100",), ())
    with pytest.raises(InvalidRequestError, match="there is no method 'nonsense'"):
        far_conditions(OPTIONS.windows, ("nonsense",))
    file = tmp_path / "a.py"
    file.write_text(200 * "count = 0\n")
    with pytest.raises(MidfillError, match="no line of them uses a name that is set far away"):
        load_far_files([file], OPTIONS)
    long = msgspec.structs.replace(OPTIONS, shortest=8000)
    with pytest.raises(MidfillError, match="no file has 8,000 to 9,000 characters"):
        load_far_files([file], long)
    file.write_text("{}")
    with pytest.raises(MidfillError, match="is not a report of 'midfill eval far'"):
        read_far(file)


def test_a_report_is_read_as_it_was_written(report: FarReport, tmp_path: Path) -> None:
    path = tmp_path / "far.json"
    path.write_bytes(msgspec.json.encode(report))
    assert read_far(path) == report
