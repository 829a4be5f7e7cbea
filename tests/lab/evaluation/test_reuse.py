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


def test_tables_show_the_curve() -> None:
    page = choose_reuse(report({DEAR: 0.1, CHEAP: 0.3}, without=10)).tables().markdown()
    lines = [line for line in page.splitlines() if line.startswith("| cacheblend")]
    assert [line.split(" | ")[0] for line in lines] == [f"| {CHEAP}", f"| {DEAR}"]
    assert lines[0].split(" | ")[1:3] == ["0.30", "0.38"]
    assert "2010 jumps in 100 files" in page
    assert "for 2000 KV was found elsewhere" in page
    assert "Reuse: off. Off: none is within 0.5 points" in page


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
