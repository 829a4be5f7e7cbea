"""KV cache: entries are rounded as NumPy rounds, and kernels read back what is stored."""

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch
from four_bit_entries import hadamard_matrix

from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import (
    KVCacheDtype,
    allocate_kv,
    entry_bytes,
    load_entry,
    touch_page,
    write_entry,
)
from midfill.kernels.cpu.simd import store

DIM = 32


@kernel
def _read(entries, out):  # type: ignore[no-untyped-def]
    for d in range(0, len(out), 16):
        store(out, d, load_entry(entries, d))


@kernel
def _touch(entries, first, end):  # type: ignore[no-untyped-def]
    for entry in range(first, end):
        touch_page(entries, entry * DIM, DIM)


def round_trip(values: np.ndarray, kv_cache_dtype: KVCacheDtype) -> tuple[np.ndarray, np.ndarray]:
    """The stored array, and what is read of it without scales."""
    entries, scales = allocate_kv(kv_cache_dtype, len(values) // DIM, DIM)
    for entry in range(len(values) // DIM):
        write_entry(values, entry * DIM, DIM, entries, scales, entry)
    out = np.empty(len(values), np.float32)
    _read(entries, out)
    return entries, out


def test_halves_are_rounded_to_nearest_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    # Every exponent that float16 knows, and smaller ones: subnormals, zeros and ties.
    values = (rng.normal(size=64_000) * 2.0 ** rng.integers(-28, 15, 64_000)).astype(np.float32)
    values[:4096] = np.arange(0x3C00, 0x4C00, dtype=np.uint16).view(np.float16)
    values[:2048] += np.spacing(values[:2048].astype(np.float16)).astype(np.float32) / 2
    entries, out = round_trip(values, KVCacheDtype.F16)
    expected = values.astype(np.float16)
    np.testing.assert_array_equal(entries, expected.view(np.uint16))
    np.testing.assert_array_equal(out, expected.astype(np.float32))


def test_numbers_too_large_for_float16_become_its_largest() -> None:
    values = np.zeros(DIM, np.float32)
    values[:5] = 1e6, -1e6, 65519, np.inf, -np.inf
    _, out = round_trip(values, KVCacheDtype.F16)
    np.testing.assert_array_equal(out[:5], [65504, -65504, 65504, 65504, -65504])


def test_bfloat16_is_rounded_to_nearest_as_torch_does() -> None:
    rng = np.random.default_rng(3)
    values = (rng.normal(size=64_000) * 2.0 ** rng.integers(-120, 120, 64_000)).astype(np.float32)
    values[:1024] = (
        (np.arange(0x3F80_8000, 0x3F80_8000 + (1024 << 15), 1 << 15))
        .astype(np.uint32)
        .view(np.float32)
    )  # ties
    entries, out = round_trip(values, KVCacheDtype.BF16)
    expected = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(entries, expected.view(torch.int16).numpy())
    np.testing.assert_array_equal(out, expected.float().numpy())


def test_infinity_becomes_the_largest_bfloat16_and_nan_stays() -> None:
    values = np.zeros(DIM, np.float32)
    values[:5] = np.inf, -np.inf, 3.4e38, np.nan, -np.nan
    _, out = round_trip(values, KVCacheDtype.BF16)
    largest = np.float32(torch.finfo(torch.bfloat16).max)
    np.testing.assert_array_equal(out[:3], [largest, -largest, largest])
    assert np.isnan(out[3:5]).all()


def test_quants_err_by_at_most_half_a_step_of_their_own_entry() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(50, DIM)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (50, 1))
    values = values.astype(np.float32)
    values[7] = 0
    entries, scales = allocate_kv(KVCacheDtype.I8, 50, DIM)
    for entry in range(50):
        write_entry(values.reshape(-1), entry * DIM, DIM, entries, scales, entry)
    back = entries.reshape(50, DIM) * scales[:, None]
    assert (np.abs(back - values) <= np.abs(values).max(axis=1, keepdims=True) / 253).all()
    _, quants = round_trip(values.reshape(-1), KVCacheDtype.I8)
    np.testing.assert_array_equal(quants.reshape(50, DIM), entries.reshape(50, DIM))


def packed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes and scales that 4-bit entries [n, 32] should have, number by number."""
    bytes_, scales = [], []
    for entry in values @ hadamard_matrix(DIM):
        largest = entry[np.abs(entry).argmax()]
        scale = largest / -8 or 1.0
        quants = np.clip(np.rint(entry / scale), -8, 7).astype(int) + 8
        for chunk in quants.reshape(-1, 16):
            bytes_ += [low | high << 4 for low, high in zip(chunk[:8], chunk[8:], strict=True)]
        scales.append(scale)
    return np.array(bytes_, np.uint8), np.array(scales)


def test_four_bit_quants_are_of_the_transform_and_packed_two_to_a_byte() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=(50, DIM)).astype(np.float32)
    values[:, 3] *= 30  # an outlier in one dimension, as keys have
    entries, scales = allocate_kv(KVCacheDtype.I4, 50, DIM)
    for entry in range(50):
        write_entry(values.reshape(-1).copy(), entry * DIM, DIM, entries, scales, entry)
    expected, expected_scales = packed(values)
    assert (entries == expected).mean() > 0.999  # but for ties, by rounding
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-5)
    back = np.empty_like(values).reshape(-1)
    _read(entries, back)
    back = (back.reshape(50, DIM) * scales[:, None]) @ hadamard_matrix(DIM)
    plain = np.abs(values).max(axis=1, keepdims=True) / 8  # a step without the transform
    assert np.abs(back - values).mean() < 0.5 * (plain / 4).mean()


def test_an_entry_of_zeros_stays_one_in_four_bits() -> None:
    entries, scales = allocate_kv(KVCacheDtype.I4, 1, DIM)
    write_entry(np.zeros(DIM, np.float32), 0, DIM, entries, scales, 0)
    out = np.ones(DIM, np.float32)
    _read(entries, out)
    assert scales[0] == 0.0
    assert not (out * scales[0]).any()


@pytest.mark.parametrize("kv_cache_dtype", list(KVCacheDtype))
def test_sizes_are_those_of_the_arrays(kv_cache_dtype: KVCacheDtype) -> None:
    entries, scales = allocate_kv(kv_cache_dtype, 10, DIM)
    assert entries.nbytes + scales.nbytes == 10 * entry_bytes(kv_cache_dtype, DIM)


@pytest.mark.parametrize("kv_cache_dtype", KVCacheDtype)
def test_touched_pages_keep_what_they_hold(kv_cache_dtype: KVCacheDtype) -> None:
    entries, _ = allocate_kv(kv_cache_dtype, 1000, DIM)
    entries[:] = np.arange(len(entries)) % 101
    before = entries.copy()
    _touch(entries, 0, 1000)
    np.testing.assert_array_equal(entries, before)


def resident_pages(array: np.ndarray) -> int:
    """How many pages of an array the system has given memory for."""
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(array.ctypes.data + array.nbytes - first) // mmap.PAGESIZE)
    found = np.zeros(count, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.mincore(
            ctypes.c_void_p(first),
            ctypes.c_size_t(count * mmap.PAGESIZE),
            ctypes.c_void_p(found.ctypes.data),
        )
        == 0
    )
    return int(np.count_nonzero(found & 1))


@pytest.mark.skipif(sys.platform != "linux", reason="calls mincore")
@pytest.mark.parametrize("kv_cache_dtype", KVCacheDtype)
def test_only_a_pages_first_entry_takes_the_page(kv_cache_dtype: KVCacheDtype) -> None:
    pages, count = 2000, 4000 * mmap.PAGESIZE // DIM
    entries, _ = allocate_kv(kv_cache_dtype, count, DIM)
    per_page = mmap.PAGESIZE * count // entries.nbytes
    _touch(entries, 1, 1)  # compiles it
    for page in range(pages):
        _touch(entries, page * per_page + 1, (page + 1) * per_page)
    assert resident_pages(entries) < pages / 10
    for page in range(pages):
        _touch(entries, page * per_page, page * per_page + 1)
    assert resident_pages(entries) > pages * 0.9
