"""Moving keys to other positions: the rotary embedding applied once more.

A key rotated for position p becomes the key of position p + shift when it is rotated by the angles
of ``shift``, since rotations add up. YaRN's attention factor is in the stored key already.
"""

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array


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
