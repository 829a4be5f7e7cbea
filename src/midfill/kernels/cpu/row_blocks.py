"""Blocks of rows that one thread takes through all matrices of a layer by itself.

Few rows are computed by all threads together: they share each matrix, panel by panel, and meet at a
barrier after it. With many rows that is slow. Each thread reads what another one has just written,
from the other core's cache, and the activations of a step don't fit a second-level cache. So then
the threads share the rows: each claims a block, runs the same phases over it alone, and claims
another one. A block's activations stay in its core's cache, and threads meet twice per layer,
before attention and after it. Weights are read once per block, which takes a few GB/s.

A thread by itself runs the code of all threads, as the only one: over views of the step's memory,
with a ``sync`` of its own.
"""

from midfill.kernels.cpu.activations import Activations, block_at
from midfill.kernels.cpu.decoder_data import Batch, Workspace
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.memory import Int64Array
from midfill.kernels.cpu.thread_pool import STARTED, ThreadContext

MAX_BLOCK_ROWS = 32
"""Maximum rows of a block: their activations stay in a cache of 1 MiB, beside the weights."""

ALONE_SYNC = STARTED
"""Numbers of a thread's own ``sync``: those that barriers and claims use."""


@kernel
def count_blocks(rows: int, threads: int) -> int:
    """Return how many blocks rows are cut into, as many for each thread; 0 if all share them."""
    most = MAX_BLOCK_ROWS * threads
    return (rows + most - 1) // most * threads if rows >= most else 0


@kernel
def alone(context: ThreadContext, sync: Int64Array) -> ThreadContext:
    """Return a thread's context as the only thread of its own."""
    thread = context.thread
    return ThreadContext(
        thread * 0, thread * 0 + 1, sync[thread], context.clock[thread : thread + 1]
    )


@kernel
def batch_part(batch: Batch, first: int, end: int) -> Batch:
    """Return the rows first to end of a batch; only what belongs to rows is cut."""
    return Batch(
        batch.token_ids[first:end], batch.positions[first:end], batch.write_slots[first:end],
        batch.logit_rows, batch.observed_rows, batch.attention, batch.parts,
    )  # fmt: skip


@kernel
def _from(x: Activations, element: int) -> Activations:
    """Return activations from an element on, a multiple of 32."""
    values, quants = x.values, x.quants
    if len(values) > 0:
        values = values[element:]
    if len(quants) > 0:
        quants = quants[block_at(element) :]
    return Activations(values, quants)


@kernel
def workspace_part(
    workspace: Workspace, thread: int, first: int, hidden: int, qkv: int, attended: int, gated: int
) -> Workspace:
    """Return memory for rows from ``first`` on, as a thread by itself uses it.

    What other threads read, or have written, lies where it does without blocks. The rest is used
    by this thread alone, for block after block, so that it stays in its cache.

    Args:
        workspace: for at least MAX_BLOCK_ROWS rows per thread.
        thread: which one.
        first: the block's first row.
        hidden, qkv, attended, gated: elements of a row.
    """
    own = thread * MAX_BLOCK_ROWS
    projected = workspace.projected
    if len(projected) > 0:
        projected = projected[own * hidden :]
    return Workspace(
        _from(workspace.normed, own * hidden), workspace.qkv[first * qkv :],
        _from(workspace.attended, first * attended), _from(workspace.gated, own * gated),
        projected, workspace.logits, workspace.maxima, workspace.argmax,
        workspace.products[thread : thread + 1], workspace.attention, workspace.cells,
        workspace.observed, workspace.partials, workspace.clock, workspace.tile_rows,
        workspace.alone, workspace.experts,
    )  # fmt: skip
