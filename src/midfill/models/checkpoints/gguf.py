"""GGUF files: the format, and a file as a Checkpoint, under canonical names and in canonical order.

The format (header, metadata and the place of each tensor) is specified in ggml's docs/gguf.md. The
``gguf`` library has a reader, too, but it creates a NumPy view per string and takes seconds for a
vocabulary.
"""

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import MappedFile, check_tensors, digest_tensors
from midfill.models.checkpoints.fused_projections import fused_rows, in_key_order
from midfill.models.checkpoints.gathered_rows import Rows, check_rows, gathered_rows
from midfill.models.checkpoints.ggml_types import (
    GGML_TYPES,
    GGUF_ARRAY,
    GGUF_SCALARS,
    GGUF_STRING,
    GgmlType,
)
from midfill.models.config import ModelConfig
from midfill.models.families import FAMILIES, config_from_gguf
from midfill.models.gguf_config import rope_factors_of
from midfill.models.tokens.gguf_tokenizer import build_tokenizer
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor

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

_OUTER_NAMES = {"token_embd": "embed", "output_norm": "final_norm", "output": "lm_head"}

_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_a": "q_a",
    "attn_q_a_norm": "q_a_norm",
    "attn_q_b": "q_b",
    "attn_kv_a_mqa": "kv_a",
    "attn_kv_a_norm": "kv_a_norm",
    "attn_kv_b": "kv_b",
    "attn_k_b": "k_b",
    "attn_v_b": "v_b",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_sinks": "attn",
    "post_attention_norm": "attn_post_norm",
    "ssm_in": "ssm_in",
    "ssm_conv1d": "ssm_conv",
    "ssm_dt": "ssm",
    "ssm_norm": "ssm_norm",
    "ssm_out": "ssm_out",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_post_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "ffn_gate_inp": "router",
    "exp_probs_b": "router",
    "ffn_gate_inp_shexp": "shared_router",
    "ffn_gate_shexp": "shared.gate",
    "ffn_up_shexp": "shared.up",
    "ffn_down_shexp": "shared.down",
}
_STACKED_NAMES = {f"ffn_{part}_exps": part for part in ("gate", "up", "down")}
"""Matrices of all experts of a layer, one after the other: [experts, out, in]."""
_HEADS = ("k_b.weight", "v_b.weight")
"""Matrices of all heads of a layer: [heads, out, in]. They are returned one below the other."""
_LEAVES = {
    "exp_probs_b": "e_score_correction_bias",
    "attn_sinks": "sinks",
    "ssm_dt": "dt_bias",
}
"""What is called "bias" or "weight" and is none of a product."""
_BARE_NAMES = {"ssm_a": "ssm.A", "ssm_d": "ssm.D"}
"""Vectors that are called neither weight nor bias."""
_VECTORS = ("ssm.A", "ssm.D", "ssm_norm.weight")
"""Vectors that files have as matrices: [n, 1], or by groups of heads, of which there is one."""

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<leaf>weight|bias)")
_BARE = re.compile(rf"blk\.(?P<layer>\d+)\.(?P<module>{'|'.join(_BARE_NAMES)})")
_STACKED = re.compile(
    rf"blk\.(?P<layer>\d+)\.(?P<module>{'|'.join(_STACKED_NAMES)})\.(?P<leaf>weight|bias)"
)
_STACKED_DIMENSIONS = {"weight": 3, "bias": 2}
_IGNORED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"
)
_PREDICTOR = re.compile(r"blk\.\d+\.nextn\..*")
"""Tensors that only layers have which predict further tokens."""
_MAX_METADATA_LIST = 1024


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a file has a tensor.

    Attributes:
        stored: name in the file.
        shape: of the tensor.
        expert: its number among those that are stored as one; None where it is stored alone.
        rows: the first of a tensor's rows and the one after the last; None where all are.
        gathered: numbers of a tensor's rows; None where all are.
    """

    stored: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None
    gathered: Rows | None = None


class GgufCheckpoint:
    """A GGUF file. Tensors are memory-mapped and dequantised only on request.

    For some families, converters store the rows of q and k with the two halves of the rotary
    embedding interleaved. They are returned in NEOX order. Only whole rows move, so quantised
    blocks stay as they are.

    Attributes:
        path, config: see ``Checkpoint``.
        metadata: the file's own keys, without long lists (the vocabulary).
    """

    def __init__(self, path: Path) -> None:
        """Open a file, and check that the model is complete.

        Raises:
            CheckpointError: it is broken, truncated or of an unsupported kind.
        """
        self.path = path
        self._file = GgufFile(path)
        self._check_whole()
        self._places = self._canonical_names()
        shapes = {name: place.shape for name, place in self._places.items()}
        self.config: ModelConfig = self._read_config(shapes)
        if FAMILIES[self.config.family].skips_predictors:
            self._leave_out_predictors()
        if FAMILIES[self.config.family].fused_projections:
            self._split_fused()
        self._gather()
        shapes = {name: place.shape for name, place in self._places.items()}
        self._check_experts()
        stored_names = {name: place.stored for name, place in self._places.items()}
        check_tensors(self.config, shapes, stored_names, path)
        self.metadata: Mapping[str, object] = {
            key: value
            for key, value in self._file.metadata.items()
            if not (isinstance(value, list) and len(value) > _MAX_METADATA_LIST)
        }

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at first use.

        Raises:
            CheckpointError: the file holds none, or one of an unsupported kind.
        """
        try:
            return build_tokenizer(self._file.metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of size, modification time, header and samples spread over the data."""
        return hashlib.sha256(self._file.fingerprint()).hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """See ``Checkpoint.content_digest``; rows are hashed in the file's own order.

        Of the matrices of a layer's experts, which the file has as one tensor, that tensor is
        hashed.
        """
        first = {place.stored: name for name, place in reversed(self._places.items())}
        entries = {name: self._file.tensors[stored] for stored, name in first.items()}
        return digest_tensors(
            StoredTensor(name, entry.shape, entry.type.kind, self._file.data(entry.name))
            for name, entry in entries.items()
        )

    def names(self) -> list[str]:
        """Return the canonical names of the tensors it holds."""
        return list(self._places)

    def kind(self, name: str) -> str:
        """Return the kind of one tensor."""
        return self._file.tensors[self._place(name).stored].type.kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._place(name).shape

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor by canonical name; q and k are copied where their rows have to move.

        Raises:
            CheckpointError: there is no such tensor.
        """
        place = self._place(name)
        entry, data = self._file.tensors[place.stored], self._file.data(place.stored)
        if place.expert is not None:
            experts = entry.shape[0]
            data = data.reshape(experts, *place.shape[:-1], -1)[place.expert]
        elif place.rows is not None:
            data = data[slice(*place.rows)]
        elif place.gathered is not None:
            data = data[place.gathered]
        elif place.shape != entry.shape:
            data = data.reshape(*place.shape[:-1], -1)
        if self.config.rotated is not None and self.config.heads_of(name):
            data = in_key_order(data, self.config.heads_of(name), self.config.rotated)
        if FAMILIES[self.config.family].gguf_interleaved_rotary:
            module = name.split(".")[-2]
            heads = {"q": self.config.query_heads, "k": self.config.kv_heads}
            if module in heads:
                data = _deinterleave(data, heads[module])
        return StoredTensor(name, place.shape, entry.type.kind, data)

    def _place(self, name: str) -> "_Place":
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return place

    def _read_config(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
        try:
            factors = self._rope_factors()
            return config_from_gguf(self._file.metadata, shapes, factors)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def _rope_factors(self) -> list[float]:
        """Return the factors of the rotary embedding's frequencies; none where none are stored."""
        stored = rope_factors_of(self._file.metadata)
        if stored not in self._file.tensors:
            return []
        if self._file.tensors[stored].type.kind != "f32":
            raise CheckpointError(f"tensor {stored!r} must be F32")
        factors: list[float] = self._file.data(stored).reshape(-1).tolist()
        return factors

    def _split_fused(self) -> None:
        """Give q, k, v, gate and up places of their own, where a file has several as one.

        Raises:
            CheckpointError: one has another number of rows than they have together.
        """
        places: dict[str, _Place] = {}
        for name, place in self._places.items():
            prefix, module, leaf = ["", *name.rsplit(".", 2)][-3:]
            parts = fused_rows(self.config).get(module)
            if parts is None:
                places[name] = place
                continue
            if place.shape[0] != sum(parts.values()):
                raise CheckpointError(
                    f"{self.path}: tensor {place.stored!r} has {place.shape[0]} rows, the model's "
                    f"configuration asks for {sum(parts.values())}"
                )
            first = 0
            for part, count in parts.items():
                shape, rows = (count, *place.shape[1:]), (first, first + count)
                places[f"{prefix}.{part}.{leaf}"] = replace(place, shape=shape, rows=rows)
                first += count
        self._places = places

    def _gather(self) -> None:
        """Give modules places of their own, where a file has several as one, row by row.

        Raises:
            CheckpointError: one has another number of rows than they have together.
        """
        modules = gathered_rows(self.config)
        places: dict[str, _Place] = {}
        for name, place in self._places.items():
            prefix, module, leaf = ["", *name.rsplit(".", 2)][-3:]
            parts = modules.get(module)
            if parts is None:
                places[name] = place
                continue
            check_rows(parts, place.shape, f"{self.path}: tensor {place.stored!r}")
            for part, rows in parts.items():
                shape = (len(rows), *place.shape[1:])
                places[f"{prefix}.{part}.{leaf}"] = replace(place, shape=shape, gathered=rows)
        self._places = places

    def _leave_out_predictors(self) -> None:
        """Leave out the layers after the last one."""
        self._places = {
            name: place
            for name, place in self._places.items()
            if not name.startswith("layers.") or int(name.split(".")[1]) < self.config.layers
        }

    def _canonical_names(self) -> "dict[str, _Place]":
        """Return canonical name -> where the file has it."""
        places: dict[str, _Place] = {}
        family = FAMILIES.get(str(self._file.metadata.get("general.architecture")))
        own_names = {} if family is None else family.gguf_modules
        for stored, entry in self._file.tensors.items():
            stacked = _STACKED.fullmatch(stored)
            name = _canonical_name(stored, own_names)
            if stacked is not None and len(entry.shape) == _STACKED_DIMENSIONS[stacked["leaf"]]:
                experts = f"layers.{int(stacked['layer'])}.experts"
                part = _STACKED_NAMES[stacked["module"]]
                for expert in range(entry.shape[0]):
                    place = _Place(stored, entry.shape[1:], expert)
                    places[f"{experts}.{expert}.{part}.{stacked['leaf']}"] = place
            elif name is not None:
                # One row, which files have as a vector.
                is_row = name.endswith("shared_router.weight") and len(entry.shape) == 1
                shape = (1, *entry.shape) if is_row else entry.shape
                if name.endswith(_HEADS) and len(shape) == 3:
                    shape = (shape[0] * shape[1], shape[2])
                if name.endswith(_VECTORS) and 1 in shape:
                    shape = (math.prod(shape),)
                places[name] = _Place(stored, shape)
            elif family is not None and family.skips_predictors and _PREDICTOR.fullmatch(stored):
                continue
            elif not _IGNORED.fullmatch(stored):
                raise CheckpointError(
                    f"{self.path}: tensor {stored!r} is of a kind of model midfill does not know"
                )
        return places

    def _check_experts(self) -> None:
        """Check that stacked matrices are those of as many experts as the file says it has."""
        experts = self.config.experts
        for stored, entry in self._file.tensors.items():
            if experts and _STACKED.fullmatch(stored) and entry.shape[0] != experts.count:
                raise CheckpointError(
                    f"{self.path}: tensor {stored!r} holds {entry.shape[0]} experts, the model's "
                    f"configuration asks for {experts.count}"
                )

    def _check_whole(self) -> None:
        parts = self._file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise CheckpointError(
                f"{self.path}: is one of {parts} parts; merge them first "
                "(llama.cpp: llama-gguf-split --merge)"
            )


def _canonical_name(stored: str, own_names: Mapping[str, str]) -> str | None:
    """Return the canonical name for a GGUF one, None for tensors that are no model weights.

    Args:
        stored: the name in the file.
        own_names: of layers' modules, see ``Family.gguf_modules``.
    """
    bare = _BARE.fullmatch(stored)
    if bare is not None:
        return f"layers.{int(bare['layer'])}.{_BARE_NAMES[bare['module']]}"
    parts = _NAME.fullmatch(stored)
    if parts is None:
        return None
    layer, module, leaf = parts["layer"], parts["module"], parts["leaf"]
    names = _OUTER_NAMES if layer is None else {**_LAYER_NAMES, **own_names}
    known = names.get(module)
    if known is None:
        return None
    leaf = _LEAVES.get(module, leaf)
    return f"{known}.{leaf}" if layer is None else f"layers.{int(layer)}.{known}.{leaf}"


def _deinterleave(data: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Reorder rows (h, pair, half) to (h, half, pair): GGML's NORM rotary order to NEOX order."""
    split = data.reshape(heads, -1, 2, *data.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)


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
