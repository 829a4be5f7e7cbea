"""GrowingArrays: memory of a step, which stays for the next one."""

from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.arrays import Float32Array
from midfill.kernels.cpu.memory import aligned_zeros

_GROWTH = 1.25


class GrowingArrays:
    """Aligned arrays by name. One is replaced only if it is too small, by one a quarter larger.

    So a load whose steps grow little by little leaves few holes in the process's memory.
    """

    def __init__(self) -> None:
        self._held: dict[str, npt.NDArray[Any]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._held.values())

    def floats(self, name: str, size: int) -> Float32Array:
        """Return a flat float32 array of at least ``size`` elements, whatever they are."""
        return self._get(name, size, np.float32)

    def bytes(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        """Return the same of uint8."""
        return self._get(name, size, np.uint8)

    def _get(self, name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        held = self._held.get(name)
        if held is None or held.size < size:
            grown = 0 if held is None else int(_GROWTH * held.size)
            held = self._held[name] = aligned_zeros(max(size, grown), dtype)
        return held
