"""bench decode-length: what is read and held at each length, and the table."""

from pathlib import Path

import pytest

from benchmarks.decode_length import (
    DENSE,
    LengthReport,
    decode_length,
    length_table,
    measure_decode_length,
)
from benchmarks.plots import plot_decode_length
from midfill.errors import OptionError

PAGES = "lserve:budget=192,static=0"
TREE = "hip:k=96,window=64,sinks=8,dense_layers=0"


@pytest.fixture(scope="module")
def report(tiny_folder: Path) -> LengthReport:
    return measure_decode_length(
        str(tiny_folder),
        [PAGES, TREE],
        [100, 700, 900],
        threads=1,
        repeats=1,
        progress=lambda _: None,
    )


def test_rows_read_no_more_than_the_budget_however_long_the_text_is(report: LengthReport) -> None:
    """A model is measured beyond its own context, too."""
    keys = {(one.method, one.tokens): one.keys for one in report.results}
    assert keys[DENSE, 900] > keys[DENSE, 700] > 700
    assert 100 < keys[PAGES, 100] < 120
    assert 128 < keys[PAGES, 700] <= 192
    assert 128 < keys[PAGES, 900] <= 192
    assert 100 < keys[TREE, 100] < 120
    assert 168 < keys[TREE, 700] < 176
    assert 168 < keys[TREE, 900] < 176
    assert all(one.seconds > 0 and one.first_seconds > 0 for one in report.results)
    assert {one.cells for one in report.results} == {1.0}
    assert {one.method for one in report.results if one.summary_bytes} == {PAGES}


def test_the_table_has_a_row_per_method_and_a_column_per_length(report: LengthReport) -> None:
    lines = length_table(report).markdown().splitlines()
    assert lines[0].startswith("| method | 100 | 700 | 900 | first step | keys read | cells |")
    assert lines[2].startswith(f"| {DENSE} |")
    assert lines[3].startswith(f"| {PAGES} |")
    assert lines[4].startswith(f"| {TREE} |")


def test_the_plot_has_a_line_per_method(report: LengthReport, tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    plot_decode_length(report, path)
    drawn = path.read_text()
    assert all(f"<!-- {name} -->" in drawn for name in (DENSE, PAGES, TREE))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"methods": "snapkv"}, "methods of sparse decoding"),
        ({"lengths": "2000,many"}, "numbers of tokens"),
        ({"lengths": "0"}, "numbers of tokens"),
    ],
)
def test_what_is_no_length_or_method_is_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        decode_length(**fields)  # type: ignore[arg-type]
