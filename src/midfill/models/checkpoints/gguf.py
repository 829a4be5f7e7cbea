"""A GGUF file as a Checkpoint, under canonical names and in canonical order."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import check_tensors, digest_tensors
from midfill.models.checkpoints.fused_projections import fused_rows, in_key_order
from midfill.models.checkpoints.gathered_rows import Rows, check_rows, gathered_rows
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.config import ModelConfig
from midfill.models.families import FAMILIES, config_from_gguf
from midfill.models.gguf_config import rope_factors_of
from midfill.models.tokens.gguf_tokenizer import build_tokenizer
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.stored_tensor import StoredTensor

_OUTER_NAMES = {"token_embd": "embed", "output_norm": "final_norm", "output": "lm_head"} | {
    "per_layer_token_embd": "layer_embed",
    "per_layer_model_proj": "layer_project",
    "per_layer_proj_norm": "layer_project_norm",
}

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
_STACKED_OUTER = {
    "altup_proj.weight": "altup_proj",
    "altup_unembd_proj.weight": "altup_unembed",
}
"""Matrices of all streams but the first, one after the other: [streams - 1, out, in]."""
_HEADS = ("k_b.weight", "v_b.weight")
"""Matrices of all heads of a layer: [heads, out, in]. They are returned one below the other."""
_LEAVES = {
    "exp_probs_b": "e_score_correction_bias",
    "attn_sinks": "sinks",
    "altup_correct_scale": "correct_output_scale",
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
        expert: its number among those that are stored as one, of experts or of streams; None where
            it is stored alone.
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
        self._leave_out_shared()
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

    def _leave_out_shared(self) -> None:
        """Leave out what computes K and V in layers that share those of others."""
        first = self.config.layers - self.config.kv_sharing_layers
        spare = {
            f"layers.{layer}.{module}.{leaf}"
            for layer in range(first, self.config.layers)
            for module in ("k", "v", "k_norm")
            for leaf in ("weight", "bias")
        }
        self._places = {name: place for name, place in self._places.items() if name not in spare}

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
            elif stored in _STACKED_OUTER and len(entry.shape) == 3:
                for number in range(entry.shape[0]):
                    place = _Place(stored, entry.shape[1:], number)
                    places[f"{_STACKED_OUTER[stored]}.{number}.weight"] = place
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
