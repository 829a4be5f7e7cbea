"""Experts on disk: as soon as a step's experts are chosen, the system is asked for all of them.

Their matrices are a mapped file. Without this, a thread that comes to a page that isn't in memory
waits until it is read, and the disk has as many requests at a time as there are threads. Asked for
together, an expert's pages are read in large requests, many at a time, while threads gather rows
and compute the experts that are there. It is a hint: what is read, and what is dropped for it, is
the system's decision, so the experts that are used most stay.
"""

import mmap
from typing import Any

from llvmlite import ir
from numba import types

from midfill.kernels.cpu.experts.table import ExpertSizes, Mixture
from midfill.kernels.cpu.intrinsics import INDEX, OWN, generated
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.simd import I32, I64, address
from midfill.kernels.cpu.thread_pool import ThreadContext
from midfill.kernels.cpu.weight_formats import PANEL

MAX_PREFETCHED = 1 << 27
"""Bytes of a layer's experts. Where a step needs more, as prompts do, what was read first would be
dropped before it is used."""
_WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
_PAGE = mmap.PAGESIZE


@generated(types.void, types.int64, OWN, INDEX, INDEX)
def _advise(context: Any, builder: Any, kinds: Any, *arguments: Any) -> None:
    """Call madvise, whose address is the first argument, for ``size`` bytes of a uint8 array."""
    function, array, at, size = arguments
    start = builder.ptrtoint(address(context, builder, kinds[1], array, at), I64)
    first = builder.and_(start, I64(-_PAGE))
    length = builder.sub(builder.add(start, size), first)
    kind = ir.FunctionType(I32, [I64, I64, I32])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [first, length, I32(_WILL_NEED)])


@kernel
def _ask_for(function: int, weights: LinearWeights, panel: int, panels: int) -> None:
    """Ask for some panels, which lie one after the other."""
    first, end = weights.panels[panel, 0], len(weights.packed)
    if panel + panels < len(weights.panels):
        end = weights.panels[panel + panels, 0]
    _advise(function, weights.packed, first, end - first)


@kernel
def _expert_bytes(sizes: ExpertSizes, mixture: Mixture) -> int:
    """Return about how many bytes an expert takes."""
    gate_up, down = mixture.weights.gate_up, mixture.weights.down
    panels = sizes.ffn // PANEL * 2
    experts = max(len(gate_up.panels) // panels, 1)
    return (len(gate_up.packed) + len(down.packed)) // experts


@kernel
def ask_for_experts(context: ThreadContext, mixture: Mixture, layer: int) -> None:
    """Ask the system for the matrices of all experts that have rows, which threads share.

    Args:
        context: this thread.
        mixture: with the address of madvise in its sizes; 0 asks for nothing.
        layer: number among those with experts.
    """
    sizes, memory = mixture.sizes, mixture.memory
    count = memory.active[sizes.experts]
    if sizes.madvise == 0 or count * _expert_bytes(sizes, mixture) > MAX_PREFETCHED:
        return
    gate_up, down = mixture.weights.gate_up, mixture.weights.down
    opening, closing = sizes.ffn // PANEL * 2, gate_up.inputs // PANEL
    for number in range(context.thread, count, context.threads):
        expert = layer * sizes.experts + memory.active[number]
        _ask_for(sizes.madvise, gate_up, expert * opening, opening)
        _ask_for(sizes.madvise, down, expert * closing, closing)
