"""Tables of what far text gains, from answers that are known."""

from midfill_lab.evaluation.far import FarAnswer, FarOptions, FarRecord, FarReport, FarTime
from midfill_lab.evaluation.far_tables import far_tables, gain

OPTIONS = FarOptions(windows=("200/100", "800/100"), methods=("hip",))


def record(number: int, kind: str, *right: bool) -> FarRecord:
    names = ("200/100", "800/100", "800/100, hip")
    return FarRecord(
        id=f"{kind}{number}", group=f"{number}.py", digest="", kind=kind, name="name", distance=500,  # type: ignore[arg-type]
        answers={
            name: FarAnswer(
                text="right" if one else "wrong", right=one, named=one,
                tokens=100 * place + 100,
            )
            for place, (name, one) in enumerate(zip(names, right, strict=True))
        },
    )  # fmt: skip


CARETS = [
    *(record(number, "far", False, number > 1, number > 2) for number in range(6)),
    *(record(number, "any", True, True, True) for number in range(4)),
]
TIMES = [
    FarTime(condition=name, tokens=1000, cold=2.0, typed=0.1, step_seconds=0.3, steps=6)
    for name in ("200/100", "800/100", "800/100, hip")
]
REPORT = FarReport(
    model="tiny", fingerprint="", machine="this one", load=0.0, options=OPTIONS,
    lines={"far": 10, "imported": 0, "any": 100}, carets=CARETS, times=TIMES, done=["a", "b"],
)  # fmt: skip


def test_differences_are_paired_by_caret() -> None:
    found = gain(REPORT, "far", "800/100", "200/100")
    assert found.value == 4 / 6
    assert found.low > 0
    assert gain(REPORT, "far", "800/100, hip", "800/100").value == -1 / 6
    assert gain(REPORT, "any", "800/100", "200/100").value == 0


def test_each_kind_has_a_table_and_times_another() -> None:
    tables = far_tables(REPORT)
    far, anywhere, times = tables.tables
    assert far.title == "A name that the file sets far above, 6 carets in 6 files"
    assert [row["window"] for row in far.rows] == ["200/100", "800/100", "800/100, hip"]
    assert far.rows[0]["minus 200/100"] == ""
    assert far.rows[1]["minus 200/100"].startswith("+66.7 [")
    assert far.rows[2]["as all keys"].startswith("83.3 [")
    assert far.rows[1]["as all keys"] == ""
    assert "name written" not in anywhere.rows[0]
    assert times.rows[0] == {
        "window": "200/100", "tokens": "1,000", "nothing cached, s": "2.00",
        "a word typed, s": "0.100", "ms per further token": "50",
    }  # fmt: skip
    assert "10.0% are far, 0.0% are imported" in tables.caption


def test_a_run_without_times_has_no_table_of_them() -> None:
    report = FarReport(
        model="", fingerprint="", machine="", load=0.0, options=OPTIONS, lines=REPORT.lines,
        carets=CARETS, times=[], done=[],
    )  # fmt: skip
    assert len(far_tables(report).tables) == 2
