"""What the forward pass of models with states takes beside what every decoder does.

A layer's number is its own among those of its kind: weights of attention are those of layers with
attention, weights of states those of layers with a state. MLPs are numbered as layers are.
"""

from typing import Any, NamedTuple

from midfill.kernels.cpu.activations import Activations
from midfill.kernels.cpu.decoder_data import DecoderWeights, Workspace
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Int32Array
from midfill.kernels.cpu.rows import NormWeights


class StateSizes(NamedTuple):
    """Numbers of ``models.config.StateSpace``, and what follows from them.

    Attributes:
        layers: with a state.
        heads: of a layer.
        head_dim: a multiple of 16; heads * head_dim is one of 32.
        state_dim: a multiple of 16.
        conv_width: inputs of one output of the convolution.
        inner, mixed, layer_floats: see ``StateSpace``.
        padded_heads: the next multiple of 16.
        stride: numbers from one row of ``StateMemory.projected`` to the next.
    """

    layers: int
    heads: int
    head_dim: int
    state_dim: int
    conv_width: int
    inner: int
    mixed: int
    layer_floats: int
    padded_heads: int
    stride: int


class StateWeights(NamedTuple):
    """What layers have instead of attention.

    Attributes:
        sizes: of a layer.
        numbers: int32 [layers of the model]: a layer's number among those with attention, or -1
            minus its number among those with a state.
        before: norm of hidden rows.
        project: W_in: rows of z, x, B, C and dt.
        conv: float32 [layers * conv_width * mixed], oldest input first.
        conv_bias: float32 [layers * mixed].
        dt_bias, decay, skip: float32 [layers * padded_heads]; the two last are A and D.
        gate_norm: norm of y * silu(z).
        output: W_out.
    """

    sizes: StateSizes
    numbers: Int32Array
    before: NormWeights
    project: LinearWeights
    conv: Float32Array
    conv_bias: Float32Array
    dt_bias: Float32Array
    decay: Float32Array
    skip: Float32Array
    gate_norm: NormWeights
    output: LinearWeights


class DeltaSizes(NamedTuple):
    """Numbers of ``models.config.DeltaRule``, and what follows from them.

    Attributes:
        layers, conv_width, inner, mixed, layer_floats, padded_heads, stride: see ``StateSizes``.
        heads: of v, of a layer.
        head_dim: a multiple of 32.
        state_dim: of a head of q or k, a multiple of 16.
        key_heads: of q and of k.
        consecutive: how many heads of v in a row have the same key: head i has that of head
            (i / consecutive) % key_heads.
    """

    layers: int
    heads: int
    head_dim: int
    state_dim: int
    conv_width: int
    inner: int
    mixed: int
    layer_floats: int
    padded_heads: int
    stride: int
    key_heads: int
    consecutive: int


class DeltaWeights(NamedTuple):
    """What layers with the delta rule have, and gates of the other layers' attention.

    Attributes:
        sizes: of a layer.
        numbers, before, conv, conv_bias, dt_bias, decay, output: see ``StateWeights``.
        project: W_in: rows of z, q, k, v, b and a.
        head_norm: of each head's y.
        query_gate: computes as many numbers as queries have, of layers with attention.
    """

    sizes: DeltaSizes
    numbers: Int32Array
    before: NormWeights
    project: LinearWeights
    conv: Float32Array
    conv_bias: Float32Array
    dt_bias: Float32Array
    decay: Float32Array
    head_norm: NormWeights
    output: LinearWeights
    query_gate: LinearWeights


class StateMemory(NamedTuple):
    """Memory of a step.

    Attributes:
        projected: float32 [rows * stride]; for a layer's gates of attention, too.
        mixed: float32 [rows * mixed], x, B and C after the convolution; or q, k and v.
        steps: float32 [rows * padded_heads], dt; or beta.
        factors: float32 [rows * padded_heads], exp(dt A); or alpha.
        outputs: float32 [rows * inner], y.
        gated: [rows, inner], norm(y * silu(z)); or norm(y) * silu(z).
    """

    projected: Float32Array
    mixed: Float32Array
    steps: Float32Array
    factors: Float32Array
    outputs: Float32Array
    gated: Activations


class StateDecoderWeights(NamedTuple):
    """All weights; ``states`` are ``StateWeights`` or ``DeltaWeights``."""

    decoder: DecoderWeights
    states: Any


class StateWorkspace(NamedTuple):
    """Memory of a step, and the states.

    Attributes:
        decoder, memory: of a step.
        values: float32 [states * layers * layer_floats]. A layer's part is the convolution's last
            inputs, [conv_width - 1, mixed], and then S of each head, [head_dim / 16, state_dim,
            16].
        requests: int32 [requests], the state of each request of the batch.
    """

    decoder: Workspace
    memory: StateMemory
    values: Float32Array
    requests: Int32Array
