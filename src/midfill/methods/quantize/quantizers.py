"""Round-to-nearest quantisers that methods are made of, and what all of them need of a model."""

from dataclasses import replace

import numpy as np

from midfill.arrays import Float32Array
from midfill.errors import InvalidRequestError
from midfill.kv.quantized import Float16Array, QuantizedVectors, UInt8Array
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.served_model import ServedModel

_TINY = np.float32(2.0**-24)
"""The smallest float16: the scale of what doesn't vary."""
_LARGEST = np.float32(65504.0)


def refuse_unsuitable(name: str, model: ServedModel) -> None:
    """Refuse a model whose keys can't be kept as quantised blocks.

    Args:
        name: of the method, for the message.
        model: the model.

    Raises:
        InvalidRequestError: all layers have a sliding window, or its KV cache is quantised itself.
    """
    FullLayers.required_by(name, model.config)
    if model.kv_cache_dtype in ("i8", "i4"):
        raise InvalidRequestError(
            f"{name} quantises keys itself and needs a KV cache of f16, bf16 or f32, not"
            f" {model.kv_cache_dtype} (--kv-cache-dtype)",
            param="method",
        )


def quantize_channels(vectors: Float32Array, bits: int) -> QuantizedVectors:
    """Quantise each channel over all vectors, from its smallest to its largest number.

    Args:
        vectors: float32 [n, head_dim], n > 0, or [m, n, head_dim], each of the m by itself.
        bits: per number.
    """
    low, scale = _range(vectors, -2, bits)
    codes = _codes(vectors, low, scale, bits)
    zero = low[..., 0, :]
    return QuantizedVectors(codes, bits, channel_scale=scale[..., 0, :], channel_zero=zero)


def quantize_tokens(vectors: Float32Array, bits: int, groups: int = 1) -> QuantizedVectors:
    """Quantise each vector, in groups of channels, from its smallest to its largest number.

    Args:
        vectors: float32 [n, head_dim] or [m, n, head_dim].
        bits: per number.
        groups: of as many channels each; head_dim / groups is a multiple of 16.
    """
    grouped = vectors.reshape(*vectors.shape[:-1], groups, -1)
    low, scale = _range(grouped, -1, bits)
    codes = _codes(grouped, low, scale, bits).reshape(vectors.shape)
    return QuantizedVectors(codes, bits, token_terms=np.concatenate((scale, low), axis=-1))


def channel_magnitudes(vectors: Float32Array) -> Float16Array:
    """Return the root of each channel's largest absolute number, 1 where all are 0: [head_dim].

    Args:
        vectors: float32 [n, head_dim], n > 0.
    """
    largest = np.maximum(vectors.max(axis=0), -vectors.min(axis=0))
    roots = np.sqrt(largest).astype(np.float16)
    return np.where(roots > 0, roots, np.float16(1))


def quantize_separable(
    vectors: Float32Array, bits: int, magnitudes: Float16Array
) -> QuantizedVectors:
    """Quantise each vector once its channels are divided by their magnitudes.

    ZipCache's channel-separable token-wise quantiser: a channel whose numbers are large doesn't
    stretch the steps of all others.

    Args:
        vectors: float32 [n, head_dim].
        bits: per number.
        magnitudes: float16 [head_dim], above 0; see ``channel_magnitudes``.
    """
    divided = np.divide(vectors, magnitudes.astype(np.float32), dtype=np.float32)
    return replace(quantize_tokens(divided, bits), channel_scale=magnitudes)


def _range(numbers: Float32Array, axis: int, bits: int) -> tuple[Float16Array, Float16Array]:
    """Return the smallest number and the step between codes along an axis, which is kept."""
    low, high = (
        np.clip(extreme, -_LARGEST, _LARGEST)
        for extreme in (numbers.min(axis, keepdims=True), numbers.max(axis, keepdims=True))
    )
    rounded = low.astype(np.float16)
    # From the rounded zero on, so that the largest number keeps a code of its own.
    span = high - rounded.astype(np.float32)
    scale = np.clip(span / np.float32(2**bits - 1), _TINY, _LARGEST)
    return rounded, scale.astype(np.float16)


def _codes(numbers: Float32Array, low: Float16Array, scale: Float16Array, bits: int) -> UInt8Array:
    """Return the codes of numbers, given the ranges that they lie in."""
    steps = numbers - low.astype(np.float32)
    # In place: fresh memory would take longer than the arithmetic.
    steps /= scale.astype(np.float32)
    np.rint(steps, out=steps)
    np.clip(steps, 0, 2**bits - 1, out=steps)
    return steps.astype(np.uint8)
