"""Safetensors files: a length, a JSON header, then the data.

They are read here instead of with the library, so that tensors stay memory-mapped: the library's
``safe_open`` copies each one, and gives its place in the file to nobody. NumPy also has no
bfloat16.
"""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import MappedFile

_DTYPES: dict[str, tuple[str, np.dtype[np.generic]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
    "F8_E4M3": ("f8_e4m3", np.dtype("u1")),
}


_BYTES = {"U8": ("u8", np.dtype("u1"))}


@dataclass(frozen=True)
class SafetensorsEntry:
    """Description of a tensor and its place in the file.

    Attributes:
        file: the file that holds it.
        kind: "f32", "f16", "bf16", "f8_e4m3", or "u8": bytes that are a part of a quantised tensor.
        shape: its shape.
        offset: first byte, counted from the file's start.
        size: length in bytes.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsFile(MappedFile):
    """An opened safetensors file.

    Attributes:
        entries: name -> description; all of them are known to lie inside the file.
    """

    def __init__(self, path: Path, *, with_bytes: bool = False) -> None:
        """Open and check a file.

        Args:
            path: the file.
            with_bytes: whether tensors of bytes are read, too.

        Raises:
            CheckpointError: it can't be read, is no safetensors file, or is truncated or broken.
        """
        super().__init__(path, _map_file(path))
        self._dtypes = _DTYPES | _BYTES if with_bytes else _DTYPES
        self.header_bytes = 8 + int.from_bytes(self._map[:8], "little")
        self.entries: Mapping[str, SafetensorsEntry] = self._read_header()

    def data(self, name: str) -> npt.NDArray[np.generic]:
        """Return a tensor's data in its shape, read-only and memory-mapped.

        bfloat16 is returned as uint16 bit patterns, float8 as uint8 ones.
        """
        return self.data_of(self.entries[name])

    def data_of(self, entry: SafetensorsEntry) -> npt.NDArray[np.generic]:
        """Return what an entry of this file, or a part of one, describes; see ``data``."""
        dtype = next(dtype for kind, dtype in self._dtypes.values() if kind == entry.kind)
        flat: npt.NDArray[np.generic] = np.frombuffer(
            self._map, dtype, math.prod(entry.shape), entry.offset
        )
        return flat.reshape(entry.shape)

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

    def _entry(self, name: str, value: Any) -> SafetensorsEntry:
        where = f"{self.path}: tensor {name!r}"
        try:
            dtype, shape, (begin, end) = (value[key] for key in ("dtype", "shape", "data_offsets"))
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole or not isinstance(dtype, str):
            raise CheckpointError(f"{where} is described wrongly in the file's header")
        if dtype not in self._dtypes:
            known = ", ".join(self._dtypes)
            raise CheckpointError(f"{where} has type {dtype}; midfill reads {known}")
        kind, numbers = self._dtypes[dtype]
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
