"""A method is chosen if it is as good as exact answers beyond doubt, and else none."""

import random
from pathlib import Path

import msgspec
import pytest

from midfill.errors import MidfillError
from midfill_lab.evaluation.jumps import Jump, JumpAnswer, JumpOptions, JumpReport
from midfill_lab.evaluation.reuse import choose_reuse, read_jumps

CHEAP, DEAR = "cacheblend:ratio=0", "cacheblend:ratio=0.4"
WORK = {CHEAP: 300, DEAR: 600}


def answer(right: bool, work: int, same: bool = True, seconds: float = 1.0) -> JumpAnswer:
    return JumpAnswer(
        ttft_seconds=seconds,
        row_layers=work,
        reused_tokens=0 if work == 1000 else 10,
        divergence=0.0 if same else 0.5,
        right=right,
        same=same,
    )


def report(losses: dict[str, float], carets: int = 2000, without: int = 0) -> JumpReport:
    """A report in which each method gets so many right exact answers wrong."""
    rng = random.Random(0)
    jumps = []
    for number in range(carets + without):
        right = rng.random() < 0.5
        answers = {
            method: answer(right and rng.random() >= loss, WORK[method], seconds=WORK[method] / 800)
            for method, loss in losses.items()
        }
        jumps.append(
            Jump(
                id=f"line/{number}",
                group=f"file {number % 100}",
                digest="0",
                tokens=800,
                cached=100,
                exact=answer(right, 1000),
                answers=answers if number < carets else {},
            )
        )
    return JumpReport(
        model="toy",
        fingerprint="0",
        machine="a machine",
        load=0.0,
        layers=2,
        options=JumpOptions(methods=tuple(losses)),
        jumps=jumps,
    )


def test_the_least_work_that_is_as_good_as_exact_is_chosen() -> None:
    assert choose_reuse(report({CHEAP: 0.0, DEAR: 0.0})).method == CHEAP
    found = choose_reuse(report({DEAR: 0.0, CHEAP: 0.2}))
    assert found.method == DEAR
    assert [result.method for result in found.results] == [CHEAP, DEAR]
    assert found.reason == "The least work within 0.5 points of exact: +0.0 [+0.0, +0.0]."
    assert found.results[0].difference.high < -0.05
    assert choose_reuse(report({CHEAP: 0.2}), margin=0.2).method == CHEAP


def test_nothing_is_chosen_where_none_is_good_enough() -> None:
    found = choose_reuse(report({CHEAP: 0.3, DEAR: 0.1}))
    assert found.method == "off"
    assert found.reason.startswith(f"Off: none is within 0.5 points of exact; the nearest, {DEAR}:")


def test_few_carets_tell_nothing() -> None:
    few = choose_reuse(report({CHEAP: 0.0}, carets=999, without=5000))
    assert few.method == "off"
    assert few.reason == "Off: 999 carets tell too little, it takes 1,000."
    assert choose_reuse(report({CHEAP: 0.0}, carets=1000)).method == CHEAP
    with pytest.raises(MidfillError, match="none of the 7 jumps shows text that is cached"):
        choose_reuse(report({CHEAP: 0.0}, carets=0, without=7))


def test_as_many_carets_are_needed_as_make_an_interval_of_the_margin() -> None:
    """One first line in twenty turns right or wrong, as many of them right as wrong."""
    margin, carets = 0.01, 1921
    exact = report({CHEAP: 0.0}, carets=carets)
    chance = random.Random(1)
    jumps = [
        msgspec.structs.replace(
            jump, answers={CHEAP: answer(jump.exact.right != (chance.random() < 0.05), 300)}
        )
        for jump in exact.jumps
    ]
    (found,) = choose_reuse(msgspec.structs.replace(exact, jumps=jumps), margin=margin).results
    assert found.gained + found.lost == pytest.approx(0.05, abs=0.01)
    assert found.gained - found.lost == pytest.approx(found.difference.value)
    assert found.carets_needed(margin) == pytest.approx(carets, rel=0.2)
    width = found.difference.high - found.difference.low
    assert width / 2 == pytest.approx(margin, rel=0.2)
    assert found.carets_needed(1.0) == 1000


def test_tables_show_the_curve() -> None:
    page = choose_reuse(report({DEAR: 0.1, CHEAP: 0.3}, without=10)).tables().markdown()
    lines = [line for line in page.splitlines() if line.startswith("| cacheblend")]
    assert [line.split(" | ")[0] for line in lines] == [f"| {CHEAP}", f"| {DEAR}"]
    assert lines[0].split(" | ")[1:3] == ["0.30", "0.38"]
    assert lines[0].split(" | ")[6].replace(",", "").isdigit()
    assert "2010 jumps in 100 files" in page
    assert "for 2000 KV was found elsewhere" in page
    assert "Reuse: off. Off: none is within 0.5 points" in page


def test_unsure_answers_are_shown_as_if_they_were_computed_exactly() -> None:
    """Of four answers, the two that are not sure are wrong, and so is a sure one."""
    exact = answer(True, 1000)
    own = [answer(number < 1, 300, same=number < 1) for number in range(4)]
    sure = [0.9, 0.9, 0.2, 0.05]
    made = report({CHEAP: 0.0}, carets=4)
    jumps = [
        msgspec.structs.replace(
            jump,
            exact=exact,
            answers={CHEAP: msgspec.structs.replace(each, confidence=confidence)},
        )
        for jump, each, confidence in zip(made.jumps, own, sure, strict=True)
    ]
    page = choose_reuse(msgspec.structs.replace(made, jumps=jumps)).tables().markdown()
    rows = [line.split(" | ") for line in page.splitlines() if f"{CHEAP} (4)" in line]
    assert [row[1:4] for row in rows] == [
        ["0.1", "75%", "0.55"],
        ["0.3", "50%", "0.80"],
        ["0.5", "50%", "0.80"],
        ["0.7", "50%", "0.80"],
    ]
    assert [row[4].split()[0] for row in rows] == ["-50.0", "-25.0", "-25.0", "-25.0"]
    assert "Unsure answers" not in choose_reuse(made).tables().markdown()


def test_what_was_measured_is_noted() -> None:
    noted = choose_reuse(report({CHEAP: 0.0, DEAR: 0.1})).measurement()
    assert (noted["jumps"], noted["carets"], noted["margin"]) == (2000, 2000, 0.005)
    methods = noted["methods"]
    assert isinstance(methods, dict)
    assert methods[CHEAP] == {
        "rows_x_layers": 0.3,
        "minus_exact": {"value": 0.0, "low": 0.0, "high": 0.0},
    }
    assert msgspec.json.decode(msgspec.json.encode(noted)) == noted


def test_reports_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(msgspec.json.encode(report({CHEAP: 0.1}, carets=3)))
    assert read_jumps(path) == report({CHEAP: 0.1}, carets=3)
    path.write_text("{}")
    with pytest.raises(MidfillError, match="is not a report of 'midfill eval reuse'"):
        read_jumps(path)
    with pytest.raises(MidfillError, match="can't be read"):
        read_jumps(tmp_path / "none.json")
