"""Packed rows hold every example once, whole, within the maximum length."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midfill.lab.training.examples import Example
from midfill.lab.training.holes import Hole
from midfill.lab.training.packing import PackedRow, Packer


def example(number: int, length: int) -> Example:
    ids = np.full(length, number, np.int32)
    hole = Hole("line", 0, 1, 2, 3 + number, 0, "psm")
    typed = np.arange(length) % 3 == number % 3
    return Example(ids, np.linspace(0, 1, length, dtype=np.float32), typed, hole)


def parts(row: PackedRow) -> list[tuple[list[int], list[float], list[bool]]]:
    """Return ids, weights and increment masks of each example of a row."""
    fields = (
        np.split(each, row.cu_seqlens[1:-1]) for each in (row.ids, row.weights, row.without_end)
    )
    return [(a.tolist(), b.tolist(), c.tolist()) for a, b, c in zip(*fields, strict=True)]


@given(st.lists(st.integers(1, 70), max_size=80))
def test_every_example_that_fits_a_row_is_packed_whole_and_once(lengths: list[int]) -> None:
    packer = Packer(50)
    examples = [example(number, length) for number, length in enumerate(lengths)]
    rows = [row for each in examples if (row := packer.add(each)) is not None]
    rows += [PackedRow.pack(each) for each in packer.rows]
    fitting = [each for each in examples if len(each.ids) <= 50]
    assert packer.dropped == len(examples) - len(fitting)
    assert all(len(row.ids) <= 50 for row in rows)
    assert sorted(part for row in rows for part in parts(row)) == sorted(
        (each.ids.tolist(), each.weights.tolist(), each.without_end.tolist()) for each in fitting
    )
    assert sum(row.characters for row in rows) == sum(each.characters for each in fitting)


def test_positions_start_anew_with_each_example() -> None:
    packer = Packer(10)
    for number, length in enumerate((3, 1, 4)):
        assert packer.add(example(number, length)) is None
    (row,) = (PackedRow.pack(each) for each in packer.rows)
    assert row.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert row.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert row.positions.dtype == np.int32


def test_rows_are_well_filled() -> None:
    packer = Packer(1000)
    lengths = np.random.default_rng(0).integers(20, 600, 400)
    examples = [example(number, int(length)) for number, length in enumerate(lengths)]
    rows = [row for each in examples if (row := packer.add(each)) is not None]
    assert np.mean([len(row.ids) for row in rows]) > 900
