"""bench speed --compare: two versions that stay loaded and are asked in turn."""

import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tiny_gguf import write_gguf
from version_stand_ins import write_checkout

from benchmarks.compare.ratios import MIN_PAIRS, VersionsReport
from benchmarks.compare.speed import CompareSpeedOptions, compare_speed
from midfill.errors import MidfillError

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="compares commits")


class Done(NamedTuple):
    """A finished comparison.

    Attributes:
        log: what both versions were asked, in words.
        steps: what was reported while it ran.
    """

    report: VersionsReport
    log: list[list[str]]
    steps: list[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def done(model: str, tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("versions")
    steps: list[str] = []
    options = CompareSpeedOptions(
        model=model, prefill=(300, 128), contexts=(16,), decoded=8, streams=3, stream_contexts=(20,)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_LOG", str(folder / "log"))
        report = compare_speed(
            options,
            "first",
            pairs=MIN_PAIRS,
            package=write_checkout(folder / "repository"),
            progress=steps.append,
        )
    return Done(report, [line.split() for line in (folder / "log").read_text().splitlines()], steps)


def test_figures_are_rates_and_how_many_times_as_fast_the_new_version_is(done: Done) -> None:
    figures = {one.name: one for one in done.report.figures}
    assert list(figures) == [
        "prefill of 300 tokens",
        "prefill of 128 tokens",
        "decode at 16 tokens",
        "decode at 20 tokens, 3 streams",
    ]
    for name, rate in zip(figures, (100.0, 100.0, 10.0, 30.0), strict=True):
        one = figures[name]
        assert one.old == pytest.approx([rate] * MIN_PAIRS)
        assert one.new == pytest.approx([2 * rate] * MIN_PAIRS)
        assert one.ratios == pytest.approx([2.0] * MIN_PAIRS)
        assert (one.ratio, one.low, one.high) == pytest.approx((2.0, 2.0, 2.0))


def test_both_are_loaded_once_before_and_then_anew_in_alternating_order(done: Done) -> None:
    loads = [name for name, what, *_ in done.log if what == "loads"]
    assert loads == ["old", "new", *["old", "new", "new", "old"] * (MIN_PAIRS // 2)]


def restarts(done: Done) -> list[list[list[str]]]:
    """What was asked after each restart of both versions."""
    found: list[list[list[str]]] = []
    for words in done.log:
        if words[1] == "loads":
            found.append([])
        else:
            found[-1].append(words)
    return [asked for asked in found if asked]


def test_requests_go_to_both_in_turn_after_one_of_each_kind_to_warm_up(done: Done) -> None:
    assert len(restarts(done)) == MIN_PAIRS
    for number, asked in enumerate(restarts(done)):
        order = ("old", "new") if number % 2 == 0 else ("new", "old")
        assert [words[0] for words in asked[:6]] == [*order] * 3
        decoded = [words[0] for words in asked if words[2:4] == ["16", "8"]][2:]
        assert decoded == [*order, *reversed(order)] * 4


def test_prompts_of_several_streams_are_computed_before_and_stay_the_same(done: Done) -> None:
    at_once = [words for words in done.log if words[1] == "answers" and words[2] == "20+20+20"]
    assert len(at_once) == 2 * 2 * 5 * MIN_PAIRS
    assert [words[3] for words in at_once] == ["1", "8"] * (len(at_once) // 2)
    assert len({words[4] for words in at_once}) == 1


def test_shorter_prompts_are_repeated_more_often(done: Done) -> None:
    asked = [words[2] for words in restarts(done)[0][10:] if words[0] == "old"]
    counts = {length: asked.count(length) for length in asked}
    assert counts == {"300": 17, "128": 20, "16": 8, "20+20+20": 2 * 4}


def test_both_get_the_same_prompts_and_none_is_prefilled_twice(done: Done) -> None:
    prefilled = []
    for asked in restarts(done):
        old, new = ([words[2:] for words in asked if words[0] == name] for name in ("old", "new"))
        assert old == new
        prefilled += [tokens for size, answer, tokens in old if answer == "1" and "+" not in size]
    assert len(set(prefilled)) == len(prefilled)


def test_steps_are_reported(done: Done) -> None:
    assert done.steps[0].startswith("old (")
    assert done.steps[2] == f"restart 1 of {MIN_PAIRS}: loading"
    assert "left: decode at 20 tokens, 3 streams" in done.steps[-1]


def test_a_report_names_the_options(done: Done, model: str) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(done.report), type=VersionsReport)
    several = ["--streams", "3", "--stream-contexts", "20"]
    assert stored.arguments == [
        "--model",
        model,
        "--prefill",
        "300,128",
        "--contexts",
        "16",
        *several,
    ]
    options = CompareSpeedOptions(model="m", streams=1, repeats=3, threads=1)
    assert options.arguments()[-4:] == ["--repeats", "3", "--threads", "1"]


def test_the_number_of_requests_can_be_set(model: str, package: Path, log: Path) -> None:
    options = CompareSpeedOptions(
        model=model, prefill=(9,), contexts=(8,), decoded=5, repeats=1, streams=1
    )
    compare_speed(options, "first", pairs=MIN_PAIRS, package=package)
    asked = [line.split()[2:4] for line in log.read_text().splitlines() if "answers" in line]
    assert asked == [["9", "1"], ["9", "1"], ["8", "5"], ["8", "5"]] * 2 * MIN_PAIRS


def test_lengths_beyond_the_models_context_are_refused_before_anything_runs(
    model: str, package: Path, log: Path
) -> None:
    options = CompareSpeedOptions(model=model, prefill=(64,), contexts=(449,))
    with pytest.raises(MidfillError, match=r"^decode at 449 tokens: .* has 512 tokens of context"):
        compare_speed(options, "first", pairs=MIN_PAIRS, package=package)
    assert log.read_text() == ""


def test_an_answer_in_one_piece_can_not_be_timed(model: str, package: Path) -> None:
    options = CompareSpeedOptions(model=model, prefill=(8,), contexts=(8,), decoded=1, streams=1)
    with pytest.raises(MidfillError, match="the answer came in one piece"):
        compare_speed(options, "first", pairs=MIN_PAIRS, package=package)


def test_a_version_that_fails_ends_the_comparison(
    model: str, package: Path, temporary: Path
) -> None:
    source = package / "__init__.py"
    source.write_text(source.read_text().replace("yield Delta(1)", "raise RuntimeError('no tea')"))
    options = CompareSpeedOptions(model=model, prefill=(8,), contexts=(8,), streams=1)
    with pytest.raises(MidfillError, match=r"(?s)^new \(\w+ with changes\) ended with 1: .*no tea"):
        compare_speed(options, "first", pairs=MIN_PAIRS, package=package)
    assert list(temporary.iterdir()) == []


def test_too_few_pairs_are_refused(model: str, package: Path) -> None:
    with pytest.raises(ValueError, match="5 pairs give no 95% interval, 6 do"):
        compare_speed(CompareSpeedOptions(model=model), "first", pairs=5, package=package)
