"""Quantised blocks: what goes into their bytes comes out of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.kv.quantized import (
    QuantizedBlock,
    QuantizedBlocks,
    QuantizedVectors,
    cell_arrays,
    cell_data,
    pack_codes,
    unpack_codes,
)
from midfill.kv.quantized_layout import BITS_PER_CODE

CELL_BYTES = 256


@st.composite
def vectors(draw: st.DrawFn, count: int, dim: int = 32) -> QuantizedVectors:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits, rank = draw(st.sampled_from(BITS_PER_CODE)), draw(st.integers(0, 16))
    places = draw(st.sets(st.integers(0, count * dim - 1), max_size=9))

    def halves(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float16)

    return QuantizedVectors(
        rng.integers(0, 2**bits, (count, dim)).astype(np.uint8),
        bits,
        halves(count, draw(st.integers(1, 2)), 2) if draw(st.booleans()) else None,
        halves(dim) if draw(st.booleans()) else None,
        halves(dim) if draw(st.booleans()) else None,
        halves(count, rank) if rank else None,
        halves(rank, dim) if rank else None,
        np.array(sorted(places), np.uint16) if places else None,
        halves(len(places)) if places else None,
    )


@st.composite
def blocks(draw: st.DrawFn) -> QuantizedBlock:
    count = draw(st.integers(1, 40))
    return QuantizedBlock.of(draw(vectors(count)), draw(vectors(count)))


@given(st.data(), st.integers(1, 40))
def test_a_block_stands_for_what_its_vectors_do(data: st.DataObject, count: int) -> None:
    keys, values = data.draw(vectors(count)), data.draw(vectors(count))
    found = QuantizedBlock.of(keys, values).decode(32)
    assert np.array_equal(found[0], keys.decode(), equal_nan=True)
    assert np.array_equal(found[1], values.decode(), equal_nan=True)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_packed_codes_take_their_bits_alone(width: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**width, (3, 32)).astype(np.uint8)
    packed = pack_codes(codes, width)
    assert packed.nbytes == codes.size * width // 8
    assert np.array_equal(unpack_codes(packed, width), codes.reshape(-1))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_higher_bits_than_are_packed_are_left_out(width: int) -> None:
    codes = np.random.default_rng(0).integers(0, 256, (3, 32)).astype(np.uint8)
    lowest = codes & np.uint8((1 << width) - 1)
    assert np.array_equal(pack_codes(codes, width), pack_codes(lowest, width))
    assert np.array_equal(unpack_codes(pack_codes(codes, width), width), lowest.reshape(-1))


@given(st.data(), st.integers(1, 9), st.sampled_from(BITS_PER_CODE), st.booleans())
def test_blocks_held_together_are_those_that_are_made_one_by_one(
    data: st.DataObject, count: int, bits: int, with_outliers: bool
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    def some(*shape: int) -> np.ndarray:
        return rng.normal(size=(3, *shape)).astype(np.float16)

    places = np.sort(rng.permuted(np.tile(np.arange(count * 32), (3, 1)), axis=1)[:, :4], axis=1)
    keys, values = (
        QuantizedVectors(
            rng.integers(0, 2**bits, (3, count, 32)).astype(np.uint8),
            bits,
            some(count, 2, 2),
            some(32),
            some(32),
            some(count, 2),
            some(2, 32),
            places.astype(np.uint16) if with_outliers else None,
            some(4) if with_outliers else None,
        )
        for _ in range(2)
    )
    for number, block in enumerate(QuantizedBlock.of_several(keys, values)):
        alone = QuantizedBlock.of(keys.of_block(number), values.of_block(number))
        assert (block.tokens, block.fields) == (alone.tokens, alone.fields)
        assert np.array_equal(block.data, alone.data)
        if not with_outliers:
            assert np.array_equal(keys.decode()[number], keys.of_block(number).decode())


def test_codes_of_eight_bits_are_packed_whatever_their_number() -> None:
    codes = np.arange(24, dtype=np.uint8)
    assert np.array_equal(pack_codes(codes, 8), codes)
    assert np.array_equal(unpack_codes(codes, 8), codes)


def test_the_bytes_of_a_block_are_those_of_its_formula() -> None:
    tokens, dim, rank = 50, 64, 2
    for bits in BITS_PER_CODE:
        keys = QuantizedVectors(
            np.zeros((tokens, dim), np.uint8),
            bits,
            channel_scale=np.ones(dim, np.float16),
            channel_zero=np.zeros(dim, np.float16),
            coefficients=np.zeros((tokens, rank), np.float16),
            basis=np.zeros((rank, dim), np.float16),
        )
        values = QuantizedVectors(keys.codes, bits, np.zeros((tokens, 1, 2), np.float16))
        codes, low_rank = tokens * dim * bits / 8, 2 * rank * (tokens + dim)
        expected = 2 * codes + 2 * 2 * dim + low_rank + 4 * tokens
        assert len(QuantizedBlock.of(keys, values).data) == expected


@given(st.lists(st.lists(blocks(), max_size=3), min_size=1, max_size=4))
def test_blocks_come_back_from_their_cells(heads: list[list[QuantizedBlock]]) -> None:
    every = [block for head in heads for block in head]
    count = sum(block.cells(CELL_BYTES) for block in every)
    memory = np.zeros((2, count + 5, CELL_BYTES // 2), np.uint8)
    cells = np.random.default_rng(0).permutation(count + 5)[:count].astype(np.int32)
    if every:
        memory[0, cells], memory[1, cells] = cell_arrays(every, CELL_BYTES)
    held = QuantizedBlocks.of_heads(heads, cells, CELL_BYTES)
    assert held.counts.tolist() == [sum(block.tokens for block in head) for head in heads]
    for head, expected in enumerate(heads):
        for number, block in zip(held.numbers(head), expected, strict=True):
            places = held.cells_of(number)
            found = held.block(number, cell_data(memory[0, places], memory[1, places]))
            assert (found.tokens, found.fields) == (block.tokens, block.fields)
            assert np.array_equal(found.data[: len(block.data)], block.data)


def test_later_blocks_follow_those_of_their_head() -> None:
    rng = np.random.default_rng(0)

    def block(tokens: int) -> QuantizedBlock:
        codes = rng.integers(0, 4, (tokens, 32)).astype(np.uint8)
        return QuantizedBlock.of(QuantizedVectors(codes, 2), QuantizedVectors(codes, 2))

    def held(heads: list[list[QuantizedBlock]], first_cell: int) -> QuantizedBlocks:
        count = sum(each.cells(CELL_BYTES) for head in heads for each in head)
        cells = np.arange(first_cell, first_cell + count, dtype=np.int32)
        return QuantizedBlocks.of_heads(heads, cells, CELL_BYTES)

    before = held([[block(3), block(40)], [], [block(5)]], 0)
    later = held([[block(7)], [block(30)], [block(2)]], 100)
    joined = before.joined(later)
    assert joined.counts.tolist() == [50, 30, 7]
    assert [joined.table[n, 0] for n in joined.numbers(0)] == [3, 40, 7]
    assert joined.cells_of(2).tolist() == later.cells_of(0).tolist()
    assert joined.cells_of(5).tolist() == later.cells_of(2).tolist()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (QuantizedVectors(np.zeros((2, 32), np.uint8), 5), "codes of 5 bits"),
        (
            QuantizedVectors(
                np.zeros((2, 32), np.uint8),
                2,
                coefficients=np.zeros((2, 17), np.float16),
                basis=np.zeros((17, 32), np.float16),
            ),
            "a rank of 17; the highest is 16",
        ),
        (
            QuantizedVectors(
                np.zeros((2049, 32), np.uint8),
                2,
                outlier_places=np.zeros(1, np.uint16),
                outliers=np.zeros(1, np.float16),
            ),
            "at most 65,536 numbers",
        ),
    ],
)
def test_what_a_block_cannot_hold_is_refused(made: QuantizedVectors, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made.pack()
