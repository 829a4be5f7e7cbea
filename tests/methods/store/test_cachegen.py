"""CacheGen: the coder loses nothing, quantising keeps its bound, and damage is noticed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midfill.errors import InvalidRequestError
from midfill.kernels.cpu.entropy.rans import TOTAL, code_bound, decode_symbols, encode_symbols
from midfill.kv.blob import BlobError
from midfill.methods.store.cachegen import (
    CacheGen,
    CacheGenCodec,
    KvShape,
    count_symbols,
    cumulative_tables,
    dequantize,
    quantize,
)

SHAPE = KvShape("f32", layers=6, kv_heads=2, head_dim=8)
METHOD = CacheGen(shallow=32, deep=16)
BINS = 16


def table(counts: list[int]) -> np.ndarray:
    bins = np.array([[len(counts)]])
    # An even number of bins has one symbol less: -M to M.
    padded = np.array(counts).reshape(1, 1, 1, -1)
    return cumulative_tables(padded, bins).reshape(-1)


def numbers(tokens: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    shape = (2, SHAPE.layers, SHAPE.kv_heads, tokens, SHAPE.head_dim)
    return scale * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def codec(method: CacheGen = METHOD) -> CacheGenCodec:
    bins = method.layer_bins(SHAPE.layers)
    symbols, _ = quantize(numbers(100, seed=9), bins)
    tables = cumulative_tables(count_symbols(symbols, method.bins), bins)
    return CacheGenCodec(method, SHAPE, tables)


@given(
    st.lists(st.integers(0, 1000), min_size=BINS, max_size=BINS),
    st.lists(st.integers(0, BINS - 2), max_size=300),
)
def test_symbols_are_decoded_to_what_they_were(counts: list[int], drawn: list[int]) -> None:
    """Whatever the table says of them: constant, unseen, or any length."""
    cumulative, symbols = table(counts), np.array(drawn, np.uint8)
    out = np.empty(code_bound(len(symbols)), np.uint8)
    start = encode_symbols(symbols, max(len(symbols), 1), cumulative, BINS, out)
    decoded = np.empty_like(symbols)
    code = out[start:].copy()
    assert decode_symbols(code, max(len(symbols), 1), cumulative, BINS, decoded) == len(code)
    assert decoded.tolist() == drawn
    if drawn:
        assert decode_symbols(code[:3], len(symbols), cumulative, BINS, decoded) == -1


def test_a_code_is_as_long_as_its_information() -> None:
    counts = [1000, 500, 250, 125, 60, 30, 15, 8, 4, 2, 1, 1, 1, 1, 1, 0]
    cumulative = table(counts)
    parts = np.diff(cumulative.astype(np.int64))[:15] / TOTAL
    symbols = np.random.default_rng(0).choice(15, 20_000, p=parts).astype(np.uint8)
    out = np.empty(code_bound(len(symbols)), np.uint8)
    start = encode_symbols(symbols, len(symbols), cumulative, BINS, out)
    information = -np.log2(parts[symbols]).sum() / 8
    assert information <= len(out) - start <= 1.002 * information + 4


@given(st.binary(max_size=60), st.integers(1, 50))
def test_a_code_of_nonsense_is_read_without_harm(code: bytes, count: int) -> None:
    symbols = np.zeros(count + 8, np.uint8)
    symbols[count:] = 77
    decode_symbols(np.frombuffer(code, np.uint8), count, table([1] * BINS), BINS, symbols[:count])
    assert (symbols[:count] < BINS).all()
    assert (symbols[count:] == 77).all()


def test_tables_give_every_possible_symbol_a_part() -> None:
    counts = np.zeros((2, 3, 5, 32), np.int64)
    counts[0, 0, 0, 4] = 10**9
    tables = cumulative_tables(counts, METHOD.layer_bins(3)).astype(np.int64)
    assert (tables[..., -1] == TOTAL).all()
    parts = np.diff(tables)
    assert (parts[:, 2, :, :15] > 0).all()
    assert (parts[:, 2, :, 15:] == 0).all(), "deep layers have symbols 0 to 14"
    assert parts[0, 0, 0].argmax() == 4


@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4])
def test_no_value_is_further_off_than_half_a_step(scale: float) -> None:
    bins = METHOD.layer_bins(SHAPE.layers)
    given_numbers = numbers(20, scale=scale / 10)
    symbols, scales = quantize(given_numbers, bins)
    error = np.abs(dequantize(symbols, scales, bins) - given_numbers)
    half = bins // 2 - 1
    bound = scales.astype(np.float32) / (2 * half[..., None])
    assert (error <= bound[:, :, None, :, None] * 1.001 + 1e-9).all()


@pytest.mark.parametrize("tokens", [1, 9, 64])
@pytest.mark.parametrize("kv_cache_dtype", ["f16", "bf16", "f32"])
def test_kv_survives_coding_as_quantising_left_it(tokens: int, kv_cache_dtype: str) -> None:
    shape = KvShape(kv_cache_dtype, SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim)
    method = METHOD
    bins = method.layer_bins(shape.layers)
    one = codec()
    one = CacheGenCodec(method, shape, one._tables)
    data = shape.write(numbers(tokens))
    rounded = dequantize(*quantize(shape.read(data, tokens), bins), bins)
    code = one.encode(data, tokens)
    assert one.decode(code, tokens) == shape.write(rounded)


def test_bfloat16_is_rounded_to_nearest() -> None:
    shape = KvShape("bf16", SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim)
    given = numbers(9)
    given.flat[:4] = 3.4e38, -3.4e38, 1 + 2**-8, 1 + 3 * 2**-8
    read = shape.read(shape.write(given), 9)
    largest = torch.finfo(torch.bfloat16).max
    expected = torch.from_numpy(given).clamp(-largest, largest).bfloat16().float().numpy()
    np.testing.assert_array_equal(read, expected)


def test_rows_of_zeros_stay_zeros() -> None:
    zeros = np.zeros((2, SHAPE.layers, SHAPE.kv_heads, 3, SHAPE.head_dim), np.float32)
    one = codec()
    assert one.decode(one.encode(SHAPE.write(zeros), 3), 3) == SHAPE.write(zeros)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6])
def test_what_can_not_be_scaled_is_refused(value: float) -> None:
    broken = numbers(4)
    broken[1, 2, 0, 1, 3] = value
    with pytest.raises(ValueError, match="can't be coded"):
        codec().encode(SHAPE.write(broken), 4)


def test_damage_is_noticed_or_harmless() -> None:
    one = codec()
    code = one.encode(SHAPE.write(numbers(5)), 5)
    for length in range(0, len(code), 7):
        with pytest.raises(BlobError):
            one.decode(code[:length], 5)
    with pytest.raises(BlobError):
        one.decode(code + b"x", 5)
    lengths = bytearray(code)
    lengths[2 * 2 * SHAPE.layers * 5] ^= 1
    with pytest.raises(BlobError):
        one.decode(bytes(lengths), 5)


def test_fewer_steps_take_fewer_bytes() -> None:
    data = SHAPE.write(numbers(64))
    sizes = [
        len(codec(CacheGen(shallow=2 * deep, deep=deep)).encode(data, 64)) for deep in (64, 16, 8)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] < len(data) / 6


def test_codecs_of_other_profiles_or_steps_have_other_names() -> None:
    other = CacheGenCodec(METHOD, SHAPE, codec()._tables.copy()[::-1])
    assert len({codec().name, other.name, codec(CacheGen(deep=8)).name}) == 3


@pytest.mark.parametrize("steps", [0, 3, 257])
def test_steps_out_of_range_are_refused(steps: int) -> None:
    with pytest.raises(InvalidRequestError, match="from 4 to 256"):
        CacheGen(deep=steps)


def test_other_formats_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="f16, bf16 or f32, not i8"):
        KvShape("i8", 1, 1, 32)
