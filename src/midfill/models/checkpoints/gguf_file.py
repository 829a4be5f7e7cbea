"""GGUF files: header, metadata and the place of each tensor.

The format is specified in ggml's docs/gguf.md. The ``gguf`` library has a reader, too, but it
creates a NumPy view per string and takes seconds for a vocabulary.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import MappedFile
from midfill.models.checkpoints.ggml_types import (
    GGML_TYPES,
    GGUF_ARRAY,
    GGUF_SCALARS,
    GGUF_STRING,
    GgmlType,
)

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4

_UNQUANTISED: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}
"""Kinds that are returned value by value; all others are returned as rows of bytes."""


@dataclass(frozen=True)
class GgufTensor:
    """Description of a tensor and its place in the file.

    Attributes:
        name: its name in the file.
        shape: rows first; the file stores the reverse.
        type: its GGML type.
        offset: first byte, counted from the file's start.
        size: length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    size: int


class GgufFile(MappedFile):
    """An opened GGUF file.

    Attributes:
        metadata: key -> plain Python value (arrays as lists).
        tensors: name -> description; all of them are known to lie inside the file.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Raises:
            CheckpointError: it can't be read, is no GGUF file, or is truncated or broken.
        """
        super().__init__(path, _map_file(path))
        reader = _Reader(self._map, path)
        tensor_count, key_count = reader.preamble()
        self.metadata = reader.metadata(key_count)
        entries = reader.tensor_entries(tensor_count)
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            reader.fail(f"general.alignment must be a multiple of 8, not {alignment!r}")
        self.header_bytes = -(-reader.position // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, type_number, offset in entries:
            tensor = self._locate(name, shape, type_number, self.header_bytes + offset)
            if tensor.name in self.tensors:
                reader.fail(f"tensor {name!r} is there twice")
            self.tensors[name] = tensor

    def data(self, name: str) -> npt.NDArray[np.generic]:
        """Return a tensor's data, read-only and memory-mapped.

        Returns:
            The tensor's shape for F32, F16 and BF16 (as uint16 bit patterns); uint8
            [rows, bytes per row] for other types.
        """
        tensor = self.tensors[name]
        dtype = _UNQUANTISED.get(tensor.type.kind)
        if dtype is not None:
            flat = np.frombuffer(self._map, dtype, math.prod(tensor.shape), tensor.offset)
            return flat.reshape(tensor.shape)
        rows = math.prod(tensor.shape[:-1])
        raw = np.frombuffer(self._map, np.uint8, tensor.size, tensor.offset)
        return raw.reshape(rows, tensor.size // rows)

    def _locate(self, name: str, shape: tuple[int, ...], type_number: int, at: int) -> GgufTensor:
        where = f"{self.path}: tensor {name!r}"
        kind = GGML_TYPES.get(type_number)
        if kind is None:
            raise CheckpointError(f"{where} has type {type_number}, which can't be dequantised")
        if shape[-1] % kind.block_values:
            raise CheckpointError(
                f"{where} has rows of {shape[-1]} values, {kind.kind} needs a multiple of "
                f"{kind.block_values}"
            )
        size = math.prod(shape) // kind.block_values * kind.block_bytes
        if at + size > len(self._map):
            raise CheckpointError(
                f"{where} ends at byte {at + size:,} but the file has only {len(self._map):,}: "
                "it is truncated; download it again"
            )
        return GgufTensor(name, shape, kind, at, size)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (it begins with {magic!r})")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from None


class _Reader:
    """A cursor over the header. Every step checks that the file holds what it reads."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._key = ""
        self.position = len(MAGIC)

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {problem}")

    def preamble(self) -> tuple[int, int]:
        """Return the numbers of tensors and of metadata keys."""
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "big"), "little") in _VERSIONS
            reason = "it is for big-endian machines" if big_endian else "midfill reads 2 and 3"
            self.fail(f"GGUF version {version} can't be read: {reason}")
        tensor_count, key_count = self._unpack("<QQ")
        return tensor_count, key_count

    def metadata(self, count: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for _ in range(self._plausible(count, min_bytes=13)):
            key = self._key = self._string()
            if key in values:
                self.fail(f"metadata key {key!r} is there twice")
            values[key] = self._value(self._value_type(), depth=0)
        self._key = ""
        return values

    def tensor_entries(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Return name, shape (rows first), type number and offset into the data of every tensor."""
        entries = []
        for _ in range(self._plausible(count, min_bytes=32)):
            name = self._string()
            (dimensions,) = self._unpack("<I")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                self.fail(f"tensor {name!r} has {dimensions} dimensions")
            shape = self._unpack(f"<{dimensions}Q")
            if not all(shape):
                self.fail(f"tensor {name!r} is empty")
            type_number, offset = self._unpack("<IQ")
            entries.append((name, shape[::-1], type_number, offset))
        return entries

    def _value(self, kind: int, depth: int) -> object:
        if kind == GGUF_STRING:
            return self._string()
        if kind != GGUF_ARRAY:
            return self._scalars(GGUF_SCALARS[kind], 1)[0]
        if depth == _MAX_NESTING:
            self.fail(f"metadata key {self._key!r} nests arrays too deep")
        item = self._value_type()
        (count,) = self._unpack("<Q")
        if item == GGUF_STRING:
            return self._strings(count)
        if item == GGUF_ARRAY:
            count = self._plausible(count, min_bytes=12)
            return [self._value(item, depth + 1) for _ in range(count)]
        return self._scalars(GGUF_SCALARS[item], count)

    def _value_type(self) -> int:
        (number,) = self._unpack("<I")
        if number not in GGUF_SCALARS and number not in (GGUF_STRING, GGUF_ARRAY):
            self.fail(f"metadata key {self._key!r} has the unknown type {number}")
        return int(number)

    def _scalars(self, dtype: str, count: int) -> list[object]:
        start = self._advance(count * np.dtype(dtype).itemsize)
        values: list[object] = np.frombuffer(self._data, dtype, count, start).tolist()
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # One loop over local names: a vocabulary and its merges have 10^5 strings and more.
        data, length_at = self._data, struct.Struct("<Q").unpack_from
        size, position = len(data), self.position
        strings = []
        try:
            for _ in range(self._plausible(count, min_bytes=8)):
                (length,) = length_at(data, position)
                start = position + 8
                position = start + length
                if position > size:
                    self._truncated()
                strings.append(data[start:position].decode())
        except struct.error:
            self._truncated()
        except UnicodeDecodeError:
            self.fail(f"metadata key {self._key!r} holds text that is not UTF-8")
        self.position = position
        return strings

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self._data, self._advance(struct.calcsize(layout)))

    def _advance(self, count: int) -> int:
        """Advance by ``count`` bytes; return where they begin."""
        start = self.position
        if count > len(self._data) - start:
            self._truncated()
        self.position = start + count
        return start

    def _plausible(self, count: int, min_bytes: int) -> int:
        """Return the count once the file is known to have room for that many items."""
        if count * min_bytes > len(self._data) - self.position:
            self._truncated()
        return count

    def _truncated(self) -> NoReturn:
        where = f" in metadata key {self._key!r}" if self._key else ""
        self.fail(f"the file ends inside its header{where}: it is truncated or broken")
