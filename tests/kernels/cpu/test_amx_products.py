"""Products on AMX have the bits of products without it, and of plain arithmetic.

The compiled kernels run in a program of their own, on an emulated AMX where the chip has none.
"""

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from amx_emulation import run_on_amx
from ggml_blocks import QUANTIZED_KINDS, random_matrix

sys.path.append(str(Path(__file__).parent))
from amx_rows import CONFIGURE, PRODUCT, RELEASE, Case

from midfill.kernels.cpu.ggml_blocks import split_blocks
from midfill.kernels.cpu.packing import natural_format
from midfill.kernels.cpu.weight_formats import LAYOUTS

PROGRAM = Path(__file__).parent / "amx_rows.py"
HEIGHTS = [(16,), (48,), (16, 48)]


def random_cases() -> list[Case]:
    """Two products of each kind of random shapes, and the odd ones."""
    random = np.random.default_rng(7)
    cases = []
    for kind in QUANTIZED_KINDS * 2:
        step = 256 if kind.endswith("_k") else 32
        cases.append(
            Case(
                (kind,),
                rows=int(random.integers(48, 120)),
                inputs=step * int(random.integers(1, 4 if step == 256 else 20)),
                outputs=int(random.integers(33, 100)),
                heights=HEIGHTS[len(cases) % 3],
                threads=1 + len(cases) % 3,
            )
        )
    return [
        *cases,
        Case(("q4_1",), 16, 32, 1, (16,)),
        Case(("q8_0",), 15, 64, 40, (16,)),
        Case(("q4_0",), 49, 288, 64, (48,)),
        Case(("q4_k", "q6_k", "q8_0"), 37, 512, 90, (16, 48), threads=2),
        Case(("q4_1",), 67, 96, 64, (16, 48), threads=2, gated=True),
    ]


CASES = random_cases()


@pytest.fixture(scope="module")
def results(
    amx_chip: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Case, tuple[np.ndarray, np.ndarray, list[int]]]:
    """What each case gives without AMX and with it, and the instructions that ran."""
    file = tmp_path_factory.mktemp("amx") / "cases"
    file.write_bytes(pickle.dumps(CASES))
    done = run_on_amx(amx_chip, PROGRAM, str(file))
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, pickle.loads(file.read_bytes()), strict=True))


def tiles_on_amx(case: Case) -> int:
    """How many tiles of 16 rows a case has."""
    if case.rows < min(case.heights):
        return 0
    left = case.rows % max(case.heights) if case.rows >= max(case.heights) else case.rows
    others = left // min(case.heights) * min(case.heights)
    return (case.rows - left + others) // 16


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_with_and_without_amx(
    results: Mapping[Case, tuple[np.ndarray, np.ndarray, list[int]]], case: Case
) -> None:
    plain, on_amx, ran = results[case]
    assert np.isfinite(plain).all()
    np.testing.assert_array_equal(on_amx, plain)
    if not ran:
        return  # not emulated, thus not counted
    panels = -(-case.outputs // 32) * (2 if case.gated else 1)
    if len(case.kinds) == 1:
        scales = 32 // LAYOUTS[natural_format(case.kinds[0])].scaled_inputs
        assert ran[PRODUCT] == tiles_on_amx(case) * panels * 2 * (case.inputs // 32) * scales
    assert ran[CONFIGURE] == ran[RELEASE] <= case.threads


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c, rounded once: the float64 sum is rounded to odd, then to float32."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    virtual = total - product
    rest = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.int64) % 2 == 0
    towards = np.where((rest > 0) == (total > 0), 1, -1)
    odd = np.where((rest != 0) & even, total.view(np.int64) + towards, total.view(np.int64))
    return odd.view(np.float64).astype(np.float32)


def by_hand(case: Case) -> np.ndarray:
    """The product as its documentation says: group by group, part by part."""
    (kind,) = case.kinds
    layout = LAYOUTS[natural_format(kind)]
    parts = split_blocks(random_matrix(kind, case.outputs, case.inputs))
    groups = case.x.reshape(case.rows, -1, 32)
    spans = np.abs(groups).max(axis=-1)
    factors = np.where(spans > 0, np.float32(127) / np.where(spans > 0, spans, 1), 0)
    x = np.rint(groups * factors.astype(np.float32)[..., None]).astype(np.int64)
    x_scales = spans / np.float32(127)
    total = np.zeros((case.rows, case.outputs), np.float32)
    for group in range(case.inputs // 32):
        block = group // layout.groups
        quants = parts.quants[:, group].astype(np.int64) - layout.zero
        for part in range(32 // layout.scaled_inputs):
            inputs = slice(part * layout.scaled_inputs, (part + 1) * layout.scaled_inputs)
            scale = parts.scales[:, block].astype(np.float32)
            if parts.integer_scales is not None:
                scale = scale * parts.integer_scales[:, group, part].astype(np.float32)
            sums = (x[:, group, inputs] @ quants[:, inputs].T).astype(np.float32)
            total = fused(sums, scale[None] * x_scales[:, group, None], total)
        if parts.minima is not None:
            minimum = parts.minima[:, block].astype(np.float32)
            if parts.integer_minima is not None:
                minimum = minimum * parts.integer_minima[:, group].astype(np.float32)
            x_sums = x_scales[:, group] * x[:, group].sum(axis=-1).astype(np.float32)
            total = fused(minimum[None], x_sums[:, None], total)
    width = -(-case.outputs // 32) * 32
    return total + np.linspace(-1, 1, width, dtype=np.float32)[: case.outputs]


@pytest.mark.parametrize("case", CASES[: len(QUANTIZED_KINDS)], ids=str)
def test_products_on_amx_equal_plain_arithmetic(
    results: Mapping[Case, tuple[np.ndarray, np.ndarray, list[int]]], case: Case
) -> None:
    np.testing.assert_array_equal(results[case][1], by_hand(case))
