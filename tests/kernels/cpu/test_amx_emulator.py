"""The emulator of AMX does what Intel's manual says: compared with numpy, and its faults."""

import pickle
import signal
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from amx_emulation import run_on_amx

PROGRAM = Path(__file__).parent / "amx_instructions.py"
AT = {6: 0, 1: 8192, 7: 16384}
"""Where each tile's bytes are: the sums, and the two operands."""


@dataclass(frozen=True)
class Case:
    """A product of random tiles.

    Attributes:
        name: LLVM's name of the product.
        rows, inner, outputs: of the sums, of the operands, and of the sums: int32 or float32.
        stride: bytes from one row of a tile to the next in memory.
        palette, configure: of the configuration, and the instruction in the place of LDTILECFG.
        second_rows: rows of the second operand, if not ``inner``.
    """

    name: str
    rows: int = 16
    inner: int = 16
    outputs: int = 16
    stride: int = 64
    palette: int = 1
    configure: str = "ldtilecfg"
    second_rows: int | None = None

    @property
    def shapes(self) -> dict[int, tuple[int, int]]:
        """Rows and bytes per row of each tile."""
        second = self.inner if self.second_rows is None else self.second_rows
        return {
            6: (self.rows, 4 * self.outputs),
            1: (self.rows, 4 * self.inner),
            7: (second, 4 * self.outputs),
        }

    @property
    def config(self) -> bytes:
        """LDTILECFG's operand."""
        row_bytes, rows = [0] * 16, [0] * 16
        for tile, (height, width) in self.shapes.items():
            rows[tile], row_bytes[tile] = height, width
        return struct.pack("<BB14x16H16B", self.palette, 0, *row_bytes, *rows)

    def data(self) -> np.ndarray:
        """Random bytes; where they are bfloat16, numbers of all sizes, zeros and tiny ones."""
        random = np.random.default_rng(self.rows * self.inner + self.stride)
        data = random.integers(0, 256, 24576).astype(np.uint8)
        if self.name == "tdpbf16ps":
            numbers = random.normal(size=8192) * 2.0 ** random.integers(-20, 20, 8192)
            numbers[::31], numbers[::37] = 0.0, 1e-39
            data[8192:] = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(
                np.uint16
            ).view(np.uint8)  # fmt: skip
            sums = random.normal(size=2048).astype(np.float32)
            sums[::29] = -1e-40
            data[:8192] = sums.view(np.uint8)
        return data

    def tile(self, data: np.ndarray, tile: int) -> np.ndarray:
        """The bytes [rows, bytes per row] of a tile."""
        rows, width = self.shapes[tile]
        return np.stack([data[AT[tile] + r * self.stride :][:width] for r in range(rows)])


BYTES = {
    "tdpbssd": (np.int8, np.int8), "tdpbsud": (np.int8, np.uint8),
    "tdpbusd": (np.uint8, np.int8), "tdpbuud": (np.uint8, np.uint8),
}  # fmt: skip
SHAPES = [(16, 16, 16, 64), (16, 8, 16, 80), (16, 4, 16, 128), (1, 1, 1, 64), (5, 3, 7, 100)]
CASES = [Case(name, *shape) for name in (*BYTES, "tdpbf16ps") for shape in SHAPES]


def run(library: Path, folder: Path, cases: list[Case]) -> "subprocess.CompletedProcess[str]":
    given = [
        (case.name, case.configure, case.config, case.data().tobytes(), case.stride)
        for case in cases
    ]
    (folder / "cases").write_bytes(pickle.dumps(given))
    return run_on_amx(library, PROGRAM, str(folder / "cases"))


def sums_of_bytes(case: Case, data: np.ndarray) -> np.ndarray:
    a_kind, b_kind = BYTES[case.name]
    sums = case.tile(data, 6).copy().view(np.int32).astype(np.int64)
    a = case.tile(data, 1).view(a_kind).astype(np.int64)
    b = case.tile(data, 7).view(b_kind).reshape(case.inner, case.outputs, 4).astype(np.int64)
    whole = sums + a @ b.swapaxes(1, 2).reshape(-1, case.outputs)
    return whole.astype(np.uint64).astype(np.uint32).view(np.float32)


def flushed(values: np.ndarray) -> np.ndarray:
    """float32 without subnormal numbers."""
    values = values.astype(np.float32)
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)


def sums_of_bfloats(case: Case, data: np.ndarray) -> np.ndarray:
    """Even and odd inputs apart, each fused; then their sum, then what was there."""

    def widened(tile: int) -> np.ndarray:
        numbers = case.tile(data, tile).copy().view(np.uint16).astype(np.uint32) << 16
        return flushed(numbers.view(np.float32)).astype(np.float64)

    a, b = widened(1).reshape(case.rows, -1, 2), widened(7).reshape(case.inner, -1, 2)
    parts = np.zeros((case.rows, case.outputs, 2))
    for k in range(case.inner):
        # A product of two bfloat16 is exact; float64 holds enough of the sum to round it once.
        parts = flushed(parts + a[:, k, None] * b[None, k]).astype(np.float64)
    before = flushed(case.tile(data, 6).copy().view(np.float32))
    return flushed(before + flushed(parts[..., 0] + parts[..., 1]))


def test_products_loads_and_stores_equal_numpy(amx_emulator: Path, tmp_path: Path) -> None:
    done = run(amx_emulator, tmp_path, CASES)
    assert done.returncode == 0, done.stderr
    results = pickle.loads((tmp_path / "cases").read_bytes())
    for case, (after, configs) in zip(CASES, results, strict=True):
        before, left = case.data(), np.frombuffer(after, np.uint8)
        expected = before.copy()
        sums = sums_of_bytes if case.name in BYTES else sums_of_bfloats
        for tile, values in ((6, sums(case, before).view(np.uint8)), (1, None)):
            rows, width = case.shapes[tile]
            for r in range(rows):
                start = AT[tile] + r * case.stride
                expected[start : start + width] = 0 if values is None else values[r]
        np.testing.assert_array_equal(left, expected, err_msg=str(case))
        assert configs[:64] == case.config
        assert configs[64:] == bytes(64)


@pytest.mark.parametrize(
    ("case", "number", "line"),
    [
        (Case("tdpbssd", configure="sttilecfg"), signal.SIGILL, "before LDTILECFG"),
        (Case("tdpbssd", palette=2), signal.SIGSEGV, "unknown palette"),
        (Case("tdpbssd", rows=17), signal.SIGSEGV, "too large a tile"),
        (Case("tdpbssd", outputs=0), signal.SIGSEGV, "half a shape"),
        (Case("tdpbssd", second_rows=8), signal.SIGILL, "shapes do not fit"),
    ],
)
def test_what_would_be_a_fault_ends_the_program(
    amx_emulator: Path, tmp_path: Path, case: Case, number: int, line: str
) -> None:
    done = run(amx_emulator, tmp_path, [case])
    assert done.returncode == -number
    assert line in done.stderr


def test_without_permission_a_tile_instruction_ends_the_program(
    amx_emulator: Path, tmp_path: Path
) -> None:
    (tmp_path / "cases").write_bytes(
        pickle.dumps([("tdpbssd", "ldtilecfg", Case("tdpbssd").config, bytes(24576), 64)])
    )
    done = run_on_amx(amx_emulator, PROGRAM, str(tmp_path / "cases"), permission="denied")
    assert done.returncode == -signal.SIGILL
    assert "without permission" in done.stderr
