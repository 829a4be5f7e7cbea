"""Names for the array types that several packages exchange."""

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
