"""Spans of cells: where the cells of some keys of one head lie, and fetching them ahead of use.

Kernels that work on one span fetch another meanwhile, cell by cell, into the second-level cache:
the values of the keys whose scores are computed, then the keys of the segment that comes next. So
memory is busy all the time, also where a prompt's slots lie scattered and no prefetcher of the
chip could follow.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from midfill.kernels.cpu.cells import load_cell_vector
from midfill.kernels.cpu.memory import LINE
from midfill.kernels.cpu.simd import I8, I32, I64, address, integer, llvm_call


class CellSpan(NamedTuple):
    """Cells of one head: number i is the one of slot slots[first + i], for 0 <= i < length.

    Attributes:
        cells: as of cells.py.
        base: element of ``cells`` where the head's slot 0 is.
    """

    cells: npt.NDArray[np.generic]
    base: int
    slots: npt.NDArray[np.int32]
    first: int
    length: int


class SpanCode:
    """A CellSpan in a function that is being generated.

    Attributes:
        length: LLVM's value for it.
    """

    def __init__(
        self, context: Any, builder: ir.IRBuilder, kind: Any, span: Any, head_dim: Any
    ) -> None:
        self._context, self._builder, self._head_dim = context, builder, head_dim
        self._cells_kind, _, self._slots_kind, _, _ = kind.types
        self._cells, self._base, self._slots, self._first, self.length = cgutils.unpack_tuple(
            builder, span
        )

    def cell(self, index: Any) -> Any:
        """Pointer to a cell; the last one stands for those behind it."""
        builder = self._builder
        last = builder.sub(self.length, integer(1))
        index = builder.select(builder.icmp_signed("<", index, last), index, last)
        at = builder.add(self._first, index)
        slot = builder.load(address(self._context, builder, self._slots_kind, self._slots, at))
        offset = builder.add(self._base, builder.mul(builder.sext(slot, I64), self._head_dim))
        return address(self._context, builder, self._cells_kind, self._cells, offset)

    def load(self, pointer: Any, element: Any) -> Any:
        """16 numbers of a cell from ``element`` on, as float32; codes without their scale."""
        at = self._builder.gep(pointer, [element])
        return load_cell_vector(self._context, self._builder, self._cells_kind, at)

    def fetch(self, index: Any, cells: int) -> None:
        """Ask for some cells, where there are any, to be brought into the second-level cache."""
        builder = self._builder
        size = self._cells_kind.dtype.bitwidth // 8
        bytes_of_cell = builder.mul(self._head_dim, integer(size))
        lines = builder.sdiv(builder.add(bytes_of_cell, integer(LINE - 1)), integer(LINE))
        with builder.if_then(builder.icmp_signed("<", index, self.length)):
            pointers = [
                builder.bitcast(self.cell(builder.add(index, integer(i))), I8.as_pointer())
                for i in range(cells)
            ]
            with cgutils.for_range(builder, lines, intp=I64) as line:
                for pointer in pointers:
                    at = builder.gep(pointer, [builder.mul(line.index, integer(LINE))])
                    hints = [I32(hint) for hint in (0, 2, 1)]  # read, second level, data
                    llvm_call(builder, "llvm.prefetch.p0", [at, *hints], ir.VoidType())
