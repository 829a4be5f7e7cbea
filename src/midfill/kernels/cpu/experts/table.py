"""What the mixture of experts reads and writes, behind one array of addresses.

The forward pass is the same code whether a model has experts or not. So it doesn't take their
weights and memory, which are many arrays, but a table of where they are, made by ``make_table``.
``unpack`` makes arrays of it again, inside the kernel.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types
from numba.np.arrayobj import populate_array

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.intrinsics import INDEX, generated
from midfill.kernels.cpu.jit import inlined_kernel, kernel
from midfill.kernels.cpu.linear import GateUpWeights, LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array, Uint8Array
from midfill.kernels.cpu.simd import I64, address, integer

MAX_MIXED_ROWS = 512
"""Rows that are mixed at a time: what they take in between is that of all their experts."""
CHUNK_ROWS = 48
"""Maximum rows of an expert that a thread multiplies by a few panels at a time."""
SWIGLU_OAI = 2
"""gpt-oss's gate, as a number beside those of ``linear.activate``."""
SCRATCH_PANELS = 2 * CHUNK_ROWS
"""Rows times panels of gate and up whose products a thread holds: 24 KiB."""


class ExpertWeights(NamedTuple):
    """The mixtures of experts of all layers that have one.

    Attributes:
        router: float32 panels [layers * (experts, then the shared expert's row, padded), hidden].
        gate_up: panels of all experts of all layers, one of gate and one of up in turn; so are the
            numbers of its bias.
        down: panels of all experts of all layers. The biases of these three have no numbers where
            ``ExpertSizes.biased`` is 0.
        shared: the first half of the shared expert's MLP; without weights where there is none.
        shared_down: its second half.
        correction: float32 [layers * experts], added to the scores that experts are chosen by; of
            use where ``ExpertMemory.preferred`` is.
        weight_factor: float32 [1], see ``models.config.Experts``.
        swiglu_limit: float32 [1], see ``models.config.ModelConfig``.
    """

    router: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    shared: GateUpWeights
    shared_down: LinearWeights
    correction: Float32Array
    weight_factor: Float32Array
    swiglu_limit: Float32Array


class ExpertSizes(NamedTuple):
    """Numbers of a mixture of experts.

    Attributes:
        experts: how many there are.
        per_token, ffn, shared_ffn, groups, groups_per_token: see ``models.config.Experts``.
        normalised: 1 if the weights of a row's experts are scaled to a sum of 1, else 0.
        activation: of the MLPs, see ``GateUpWeights``; or SWIGLU_OAI.
        shared_gated: 1 if the shared expert's outputs are weighted, else 0.
        sigmoid: 1 if probabilities are sigmoids, 0 if they are a softmax.
        corrected: 1 if experts are chosen by corrected scores, else 0.
        biased: 1 if the router and the experts have biases, else 0.
        linear: address of the kernel for products with experts, see ``LINEAR_AT``; 0 is that of all
            others.
        madvise: address of that function of the system, where the experts' matrices are in a mapped
            file; 0 where they are in memory.
    """

    experts: int
    per_token: int
    normalised: int
    ffn: int
    shared_ffn: int
    activation: int
    shared_gated: int = 1
    sigmoid: int = 0
    corrected: int = 0
    groups: int = 1
    groups_per_token: int = 1
    biased: int = 0
    linear: int = 0
    madvise: int = 0


class ExpertMemory(NamedTuple):
    """Memory for up to ``MAX_MIXED_ROWS`` rows. A pair is a row and one of its experts.

    Pairs are numbered by row, then by rank, the likeliest expert first; or they are in order: by
    expert, then by row.

    Attributes:
        router_tiles: uint8 [49], see tiles.py: of products with the router.
        zeros: float32: biases.
        scores: float32 [rows * router.outputs].
        preferred: float32 [rows * router.outputs], by which experts are chosen; empty where that is
            ``scores``.
        chosen: int32 [pairs], the expert.
        weights: float32 [rows * (per_token + 1)], of each expert, and of the shared one.
        places: int32 [pairs], where a pair is in order.
        ordered_rows: int32 [pairs], the row of each pair in order.
        starts: int32 [experts + 1], an expert's first pair in order.
        cursors: int32 [experts].
        active: int32 [experts + 1], the experts with pairs; their number is the last element.
        gathered: [pairs, hidden], normed rows in order; without values where no expert has float32
            weights.
        opened: [pairs, ffn], act(gate) * up in order; likewise.
        expanded: float32 [pairs * hidden], the experts' outputs in order.
        shared: float32 [rows * hidden], the shared expert's outputs.
        scratch: float32 [threads * SCRATCH_PANELS * 64].
    """

    router_tiles: Uint8Array
    zeros: Float32Array
    scores: Float32Array
    preferred: Float32Array
    chosen: Int32Array
    weights: Float32Array
    places: Int32Array
    ordered_rows: Int32Array
    starts: Int32Array
    cursors: Int32Array
    active: Int32Array
    gathered: Activations
    opened: Activations
    expanded: Float32Array
    shared: Float32Array
    scratch: Float32Array


class Mixture(NamedTuple):
    """A table's content."""

    sizes: ExpertSizes
    weights: ExpertWeights
    memory: ExpertMemory


_SIZES = len(ExpertSizes._fields)
LINEAR_AT = ExpertSizes._fields.index("linear")
"""Where a table has ``ExpertSizes.linear``, which is known once it is compiled."""
_MATRICES = 6


def make_table(
    sizes: ExpertSizes, weights: ExpertWeights, memory: ExpertMemory, layers: Sequence[int]
) -> Int64Array:
    """Return the table for ``unpack``. Whoever holds it keeps the arrays alive.

    Args:
        sizes, weights, memory: the content.
        layers: for each layer of the model, its number among those with experts, or -1.
    """
    numbers = list(sizes)
    for matrix in (
        weights.router, weights.gate_up, weights.down, weights.shared.gate, weights.shared.up,
        weights.shared_down,
    ):  # fmt: skip
        numbers += [*_place(matrix.packed), *_place(matrix.panels), matrix.outputs, matrix.inputs]
    for vector in (
        weights.correction, weights.weight_factor, weights.swiglu_limit, weights.router.bias,
        weights.gate_up.bias, weights.down.bias,
    ):  # fmt: skip
        numbers += _place(vector)
    for field in memory:
        for array in field if isinstance(field, tuple) else (field,):
            numbers += _place(array)
    return np.array([*numbers, *layers], np.int64)


def _place(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Return an array's address and the length of its first dimension."""
    return array.ctypes.data, len(array)


def _array_reader(kind: Any, columns: int = 0) -> Any:
    """Return a function that makes an array of the address and length at table[at]."""
    width = kind.bitwidth // 8
    array_type = types.Array(kind, 2 if columns else 1, "C")

    @generated(array_type, types.Array(types.int64, 1, "C"), INDEX)
    def read(context: Any, builder: Any, kinds: Any, table: Any, at: Any) -> Any:
        """Return the array whose place is at table[at]."""
        pointer = address(context, builder, types.Array(types.int64, 1, "C"), table, at)
        length = builder.load(builder.gep(pointer, [integer(1)]))
        array = context.make_array(array_type)(context, builder)
        data = builder.inttoptr(builder.load(pointer), array.data.type)
        shape, strides = [length], [I64(width * max(columns, 1))]
        if columns:
            shape, strides = [*shape, I64(columns)], [*strides, I64(width)]
        populate_array(array, data, shape, strides, I64(width), None)
        return array._getvalue()

    return read


_bytes_at = _array_reader(types.uint8)
_floats_at = _array_reader(types.float32)
_integers_at = _array_reader(types.int32)
_panels_at = _array_reader(types.int64, columns=2)


@kernel
def _matrix(table: Int64Array, number: int, bias: Float32Array) -> LinearWeights:
    at = _SIZES + 6 * number
    return LinearWeights(
        _bytes_at(table, at), _panels_at(table, at + 2), bias, table[at + 4], table[at + 5]
    )


@kernel
def _bias_at(table: Int64Array, at: int, zeros_at: int) -> int:
    """Return where the table has a bias, or zeros in its place."""
    return at if table[at + 1] > 0 else zeros_at


@inlined_kernel
def unpack(table: Int64Array) -> Mixture:
    """Return what ``make_table`` was given."""
    further = _SIZES + 6 * _MATRICES
    at = further + 12
    zeros = _floats_at(table, at + 2)
    sizes = ExpertSizes(
        table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7], table[8],
        table[9], table[10], table[11], table[12], table[13],
    )  # fmt: skip
    weights = ExpertWeights(
        _matrix(table, 0, _floats_at(table, _bias_at(table, further + 6, at + 2))),
        _matrix(table, 1, _floats_at(table, _bias_at(table, further + 8, at + 2))),
        _matrix(table, 2, _floats_at(table, _bias_at(table, further + 10, at + 2))),
        GateUpWeights(_matrix(table, 3, zeros), _matrix(table, 4, zeros), sizes.activation, True),
        _matrix(table, 5, zeros), _floats_at(table, further), _floats_at(table, further + 2),
        _floats_at(table, further + 4),
    )  # fmt: skip
    memory = ExpertMemory(
        _bytes_at(table, at), zeros, _floats_at(table, at + 4), _floats_at(table, at + 6),
        _integers_at(table, at + 8), _floats_at(table, at + 10), _integers_at(table, at + 12),
        _integers_at(table, at + 14), _integers_at(table, at + 16), _integers_at(table, at + 18),
        _integers_at(table, at + 20),
        Activations(_floats_at(table, at + 22), _bytes_at(table, at + 24)),
        Activations(_floats_at(table, at + 26), _bytes_at(table, at + 28)),
        _floats_at(table, at + 30), _floats_at(table, at + 32), _floats_at(table, at + 34),
    )  # fmt: skip
    return Mixture(sizes, weights, memory)
