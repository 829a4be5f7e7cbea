"""What 4-bit entries of a KV cache hold, and what they are multiplied with, as NumPy sees it."""

import numpy as np


def hadamard_matrix(size: int) -> np.ndarray:
    """Sylvester's orthogonal matrix of a power of two, the Hadamard transform's."""
    if size == 1:
        return np.ones((1, 1))
    half = hadamard_matrix(size // 2) / np.sqrt(2)
    return np.block([[half, half], [half, -half]])


def unpacked(entries: np.ndarray) -> np.ndarray:
    """Return the quants of uint8 entries, -8..7, flat."""
    halves = entries.reshape(-1, 8).astype(np.int8)
    return np.concatenate([halves & 15, halves >> 4 & 15], axis=1).reshape(-1) - 8


def rounded_to_int8(numbers: np.ndarray) -> np.ndarray:
    """Return [..., n] numbers as int8 with a scale per row of n holds them."""
    scales = np.abs(numbers).max(axis=-1, keepdims=True) / 127
    return np.rint(numbers / np.where(scales > 0, scales, 1)) * scales
