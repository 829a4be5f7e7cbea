"""The safetensors file format: the place of each tensor. Independent of models.

The format (a length, a JSON header, then the data) is read here instead of with the library, so
that tensors stay memory-mapped. NumPy also has no bfloat16.
"""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError

_DTYPES: dict[str, tuple[str, np.dtype[np.generic]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
}


@dataclass(frozen=True)
class SafetensorsEntry:
    """Description of a tensor and its place in the file.

    Attributes:
        file: the file that holds it.
        kind: "f32", "f16" or "bf16".
        shape: its shape.
        offset: first byte, counted from the file's start.
        size: length in bytes.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsFile:
    """An opened safetensors file. Its data is memory-mapped, not read.

    Attributes:
        path: the file.
        entries: name -> description; all of them are known to lie inside the file.
        header_bytes: bytes before the first tensor's data.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Raises:
            CheckpointError: it can't be read, is no safetensors file, or is truncated or broken.
        """
        self.path = path
        self._map = _map_file(path)
        self.header_bytes = 8 + int.from_bytes(self._map[:8], "little")
        self.entries: Mapping[str, SafetensorsEntry] = self._read_header()

    def data(self, name: str) -> npt.NDArray[np.generic]:
        """Return a tensor's data in its shape, read-only and memory-mapped.

        bfloat16 is returned as uint16 bit patterns.
        """
        entry = self.entries[name]
        dtype = next(dtype for kind, dtype in _DTYPES.values() if kind == entry.kind)
        flat: npt.NDArray[np.generic] = np.frombuffer(
            self._map, dtype, math.prod(entry.shape), entry.offset
        )
        return flat.reshape(entry.shape)

    def bytes_at(self, where: slice) -> bytes:
        """Return a copy of a range of the file."""
        return self._map[where]

    def __len__(self) -> int:
        """Return the file's size in bytes."""
        return len(self._map)

    def _read_header(self) -> dict[str, SafetensorsEntry]:
        if len(self) < 8 or self.header_bytes > len(self):
            raise CheckpointError(
                f"{self.path}: the file ends inside its header: truncated or broken"
            )
        try:
            header = json.loads(self._map[8 : self.header_bytes])
            described = {name: value for name, value in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{self.path}: not a safetensors file: its header is broken"
            ) from None
        return {name: self._entry(name, value) for name, value in described.items()}

    def _entry(self, name: str, value: object) -> SafetensorsEntry:
        where = f"{self.path}: tensor {name!r}"
        try:
            dtype, shape, (begin, end) = (value[key] for key in ("dtype", "shape", "data_offsets"))  # type: ignore[index]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole or not isinstance(dtype, str):
            raise CheckpointError(f"{where} is described wrongly in the file's header")
        if dtype not in _DTYPES:
            raise CheckpointError(f"{where} has type {dtype}; midfill reads {', '.join(_DTYPES)}")
        kind, numbers = _DTYPES[dtype]
        size = math.prod(shape) * numbers.itemsize
        if end - begin != size:
            raise CheckpointError(
                f"{where} of shape {shape} takes {size:,} bytes, not {end - begin:,}"
            )
        if self.header_bytes + end > len(self):
            raise CheckpointError(
                f"{where} ends at byte {self.header_bytes + end:,} but the file has only "
                f"{len(self):,}: it is truncated; download it again"
            )
        return SafetensorsEntry(self.path, kind, tuple(shape), self.header_bytes + begin, size)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"{path}: can't be read: {error}") from None
