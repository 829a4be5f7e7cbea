"""Moving keys to other positions: the rotary embedding applied once more.

A key rotated for position p becomes the key of position p + shift when it is rotated by the angles
of ``shift``, since rotations add up. YaRN's attention factor is in the stored key already.
"""

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array, Int64Array


def shift_keys(keys: Float32Array, shift: Int32Array, frequencies: Float32Array) -> Float32Array:
    """Return keys [n, head_dim] moved by [n] positions.

    Args:
        keys: float32, after the rotary embedding.
        shift: int32, positive or negative.
        frequencies: float32 [head_dim / 2], radians per position; or [n, head_dim / 2] where keys
            turn by different ones.
    """
    if frequencies.ndim == 2:
        return _turn(keys, shift[:, None].astype(np.float64) * frequencies)
    shifts, which = np.unique(shift, return_inverse=True)
    return _turn(keys, shifts[:, None].astype(np.float64) * frequencies.astype(np.float64), which)


def _turn(
    keys: Float32Array, angles: Float64Array, which: Int64Array | slice = slice(None)
) -> Float32Array:
    """Rotate each key by the angles [head_dim / 2] of row ``which``."""
    cos, sin = np.cos(angles).astype(np.float32)[which], np.sin(angles).astype(np.float32)[which]
    first, second = np.split(keys, 2, axis=1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)
