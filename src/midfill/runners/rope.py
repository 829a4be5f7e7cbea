"""Rotary position embedding: angles of every position, with context scaling; keys that move.

RoFormer (Su et al., 2021, arXiv 2104.09864). Angles are float32 numbers computed in transformers'
order of operations: at position 8000, one rounding step of the angle is already 5e-4 radians.
Powers, cosines and sines are computed in float64 and rounded once. torch's are a unit in the last
place away in some 5% of the entries.

A key rotated for position p becomes the key of position p + shift when it is rotated by the angles
of ``shift``, since rotations add up. YaRN's attention factor is in the stored key already.
"""

import math

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.models.config import ModelConfig, RopeScaling

ROPE_VERSION = 2
"""To be raised when a bit of a table changes: stored keys were rotated by it."""
_POSITIONS_AT_ONCE = 1024  # so that what is computed in float64 stays in the caches


def rope_tables(
    config: ModelConfig, length: int, *, local: bool = False
) -> tuple[Float32Array, Float32Array]:
    """Return cosines and sines of the rotary angles.

    Args:
        config: the model.
        length: number of positions, from 0.
        local: those of layers with ``ModelConfig.is_local``.

    Returns:
        cos, sin: float32 [length, head_dim / 2], those of pairs that don't turn first; of latent
            attention [length, rotary_dim / 2]. The attention factor is multiplied in.
    """
    frequencies, attention_factor = rope_frequencies(config, local=local)
    factor = np.float32(attention_factor)
    still = 0 if config.latent is not None else (config.head_dim - config.rotary_dim) // 2
    cos = np.ones((length, still + len(frequencies)), np.float32)
    sin = np.zeros_like(cos)
    for first in range(0, length, _POSITIONS_AT_ONCE):
        end = min(first + _POSITIONS_AT_ONCE, length)
        angles = (np.arange(first, end, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        cos[first:end, still:] = np.cos(angles).astype(np.float32) * factor
        sin[first:end, still:] = np.sin(angles).astype(np.float32) * factor
    return cos, sin


def model_tables(config: ModelConfig) -> list[tuple[Float32Array, Float32Array]]:
    """Return the tables of all positions, then those of local layers, if the model has any."""
    length = config.context if config.has_rope else 1
    tables = [rope_tables(config, length)]
    if config.local_rope_theta is not None:
        tables.append(rope_tables(config, length, local=True))
    return tables


def layer_frequencies(config: ModelConfig) -> Float32Array:
    """Return each layer's radians per position: float32 [layers, head_dim / 2].

    Those of pairs that don't turn are 0.
    """
    still = np.zeros((config.head_dim - config.rotary_dim) // 2, np.float32)
    both = [
        np.concatenate((still, rope_frequencies(config, local=local)[0])) for local in (False, True)
    ]
    return np.stack([both[config.is_local(layer)] for layer in range(config.layers)])


def rope_frequencies(config: ModelConfig, *, local: bool = False) -> tuple[Float32Array, float]:
    """Return radians per position [rotary_dim / 2], and the factor of cosines and sines.

    Without a rotary embedding nothing turns, so one table of position 0 does for all positions.

    Args:
        config: the model.
        local: those of layers with ``ModelConfig.is_local``, if there are any.
    """
    if not config.has_rope:
        return np.zeros(config.rotary_dim // 2, np.float32), 1.0
    scaling = config.rope_scaling
    theta, dim = config.rope_theta, config.rotary_dim
    if local and config.local_rope_theta is not None:
        return _inverse_powers(config.local_rope_theta, dim), 1.0
    match scaling.kind:
        case "none":
            return _inverse_powers(theta, dim), 1.0
        case "linear":
            return _inverse_powers(theta, dim) / np.float32(scaling.factor), 1.0
        case "factors":
            factors = np.array(scaling.frequency_factors, np.float32)
            return _inverse_powers(theta, dim) / factors, scaling.attention_factor or 1.0
        case "dynamic":
            return _inverse_powers(_dynamic_theta(config), dim), 1.0
        case "llama3":
            return _llama3(_inverse_powers(theta, dim), scaling), 1.0
        case "yarn":
            return _yarn(theta, dim, scaling), _yarn_attention_factor(scaling)


def _powers(theta: float, dim: int) -> Float32Array:
    """Return theta ** (2i / dim) of the [dim / 2] pairs, theta and exponents being float32."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: Float64Array = np.power(float(np.float32(theta)), exponents.astype(np.float64))
    return powers.astype(np.float32)


def _inverse_powers(theta: float, dim: int) -> Float32Array:
    return np.float32(1.0) / _powers(theta, dim)


def _dynamic_theta(config: ModelConfig) -> float:
    """Return dynamic NTK scaling's theta for a sequence of the whole configured context.

    In transformers, theta depends on the length of the sequence. Cached keys would then be rotated
    by other angles than new ones, and the same text would have other keys in a longer prompt. With
    a fixed theta, as in vLLM, cached keys stay valid.
    """
    scaling, dim = config.rope_scaling, config.rotary_dim
    length = max(config.context, scaling.original_context)
    stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    return float(config.rope_theta * stretch ** (dim / (dim - 2)))


def _llama3(frequencies: Float32Array, scaling: RopeScaling) -> Float32Array:
    """Scale as Llama 3.1: stretch long wavelengths, keep short ones, blend those between."""
    # Divided as torch divides a number by a tensor.
    wavelengths = (1 / frequencies) * np.float32(2 * math.pi)
    turns = (1 / wavelengths) * np.float32(scaling.original_context)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (turns - low) / (high - low)
    blended = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    stretched = frequencies / scaling.factor
    is_long = wavelengths > scaling.original_context / low
    is_short = wavelengths < scaling.original_context / high
    shortened = np.where(is_short, frequencies, blended)
    scaled: Float32Array = np.where(is_long, stretched, shortened)
    return scaled


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> Float32Array:
    """Scale as YaRN (Peng et al., 2023, arXiv 2309.00071): interpolate slow dimensions only.

    A dimension that turns more than beta_fast times within the original context keeps its
    frequency. One that turns less than beta_slow times is divided by the factor. A linear ramp
    connects them.
    """

    def dimension_turning(turns: float) -> float:
        span = scaling.original_context / (turns * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(theta))

    first, last = dimension_turning(scaling.beta_fast), dimension_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    powers = _powers(theta, dim)
    ramp = ((np.arange(dim // 2, dtype=np.float32) - first) / (last - first)).clip(0.0, 1.0)
    kept = 1 - ramp
    scaled: Float32Array = 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
    return scaled


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """Return YaRN's factor of queries and keys, which sharpens attention over long contexts."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def shift_keys(
    keys: Float32Array, shift: Int32Array, frequencies: Float32Array, layers: Int32Array | None
) -> Float32Array:
    """Return keys [n, head_dim] moved by [n] positions.

    Args:
        keys: float32, after the rotary embedding.
        shift, frequencies, layers: see ``rotations``.
    """
    cos, sin, turns = rotations(shift, frequencies, layers)
    first, second = np.split(keys, 2, axis=1)
    cos, sin = cos[turns], sin[turns]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)


def rotations(
    shift: Int32Array, frequencies: Float32Array, layers: Int32Array | None
) -> tuple[Float32Array, Float32Array, Int32Array]:
    """Return the angles by which keys turn; each kind of layer and distance has them once.

    Args:
        shift: int32 [n], positions that each key moves by, positive or negative.
        frequencies: float32 [layers, head_dim / 2], radians per position.
        layers: int32 [n], whose keys they are; None: all turn as the first layer's.

    Returns:
        cos, sin: float32 [m, head_dim / 2]; and int32 [n], which row each key turns by.
    """
    kinds, kind_of_layer = np.unique(frequencies, axis=0, return_inverse=True)
    kind = kind_of_layer.reshape(-1)[0 if layers is None else layers]
    distances, number = _distinct(shift)
    angles: Float64Array = distances[:, None].astype(np.float64) * kinds[:, None, :]
    angles = angles.reshape(-1, kinds.shape[1])
    turns = (kind * len(distances) + number).astype(np.int32)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), turns


def _distinct(shift: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return distances that [n] shifts are among, and which one each is.

    Shifts are mostly close to each other: then these are all between the least and the greatest,
    which takes no sorting.
    """
    if not len(shift):
        return shift, shift
    least, most = int(shift.min()), int(shift.max())
    if most - least <= len(shift):
        return np.arange(least, most + 1, dtype=np.int32), shift - np.int32(least)
    distances, number = np.unique(shift, return_inverse=True)
    return distances, number.astype(np.int32)
