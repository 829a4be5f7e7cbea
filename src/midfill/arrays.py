"""The array types that several packages exchange, and what they all ask of tokens."""

from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

RunnerArray = Any
"""An array of a runner's own type, where the runner keeps it: NumPy's, or a tensor of torch. Like
NumPy's it has a shape and is indexed with numbers, slices and int64 arrays."""


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Return how many leading tokens two arrays, [n] and [m] int32, have in common."""
    span = min(len(a), len(b))
    differs = a[:span] != b[:span]
    return int(differs.argmax()) if differs.any() else span
