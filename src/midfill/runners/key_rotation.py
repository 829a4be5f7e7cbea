"""Moving keys to other positions: the rotary embedding applied once more.

A key rotated for position p becomes the key of position p + shift when it is rotated by the angles
of ``shift``, since rotations add up. YaRN's attention factor is in the stored key already.
"""

import numpy as np

from midfill.arrays import Float32Array, Int32Array


def shift_keys(keys: Float32Array, shift: Int32Array, frequencies: Float32Array) -> Float32Array:
    """Return keys [n, head_dim] moved by [n] positions.

    Args:
        keys: float32, after the rotary embedding.
        shift: int32, positive or negative.
        frequencies: float32 [head_dim / 2], radians per position.
    """
    shifts, which = np.unique(shift, return_inverse=True)
    angles = shifts[:, None].astype(np.float64) * frequencies[None, :].astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32)[which], np.sin(angles).astype(np.float32)[which]
    first, second = np.split(keys, 2, axis=1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)
