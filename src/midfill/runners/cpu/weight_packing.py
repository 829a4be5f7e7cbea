"""Packs a checkpoint's weights, matrix by matrix, into the arrays that the CPU kernels read."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from midfill.config import WeightsOption
from midfill.errors import CheckpointError
from midfill.kernels.cpu.memory import Int64Array, Uint8Array, aligned_zeros
from midfill.kernels.cpu.packing import PackedMatrix, natural_format, pack, packed_bytes
from midfill.kernels.cpu.weight_formats import LAYOUTS, PANEL, WeightFormat, panel_count
from midfill.models.config import ModelConfig
from midfill.runners.cpu.packed_altup import LAYER_MATRICES, OUTER_MATRICES, altup_vectors
from midfill.runners.cpu.packed_delta_rule import QUERY_GATE
from midfill.runners.cpu.packed_experts import (
    INTERLEAVED,
    OFFLOADED,
    ROUTER,
    expert_biases,
    expert_sources,
    is_mxfp4,
    router_corrections,
    router_tensors,
)
from midfill.runners.cpu.packed_latent import (
    QUERY,
    head_tensors,
    latent_norms,
)
from midfill.runners.cpu.packed_state_space import (
    OUTPUT,
    PROJECT,
    state_vectors,
)
from midfill.stored_tensor import StoredTensor
from midfill.system.files import read_ahead, release_pages
from midfill.system.machine import available_threads
from midfill.system.progress import Progress

if TYPE_CHECKING:  # kernels are compiled before its libraries are installed
    from midfill.models.checkpoints.checkpoint import Checkpoint

_MATRICES = {
    "qkv": ("q", "q_a", "k", "v", "kv_a"),
    QUERY: ("q_b",),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    PROJECT: ("ssm_in", "ssm_gate", "ssm_qkv", "ssm_beta", "ssm_alpha"),
    OUTPUT: ("ssm_out",),
    QUERY_GATE: ("q_gate",),
    **{name: (name,) for name in LAYER_MATRICES},
}
"""The checkpoint's matrices that are packed as one, by the name under which they are kept.

A model has some of them."""


_INTERLEAVED = ("gate_up", *INTERLEAVED)
"""The kernel reads a panel of each in turn."""


Allocate = Callable[[str, int], Uint8Array]
"""Returns zeros for packed matrices, by name and size."""


class TensorSource(Protocol):
    """What weights are packed from: a checkpoint, usually."""

    config: ModelConfig

    @property
    def path(self) -> Path:
        """Where it is, for error messages."""

    def names(self) -> list[str]:
        """Return the tensors' canonical names."""

    def tensor(self, name: str) -> StoredTensor:
        """Return one tensor."""


@dataclass(frozen=True)
class PackedSize:
    """Bytes that a model's matrices take, packed.

    Attributes:
        total: of all of them.
        experts: of those of experts that can be left on disk.
    """

    total: int
    experts: int


def packed_size(checkpoint: "Checkpoint", option: WeightsOption = "auto") -> PackedSize:
    """Return how large a model is packed, without reading its weights.

    Args:
        checkpoint: the model.
        option: see ``load_packed``.
    """
    sources = _matrix_sources(checkpoint)
    in_mxfp4 = option != "f32" and is_mxfp4(sources, checkpoint.kind)

    def size(name: str, layer: list[str]) -> int:
        shapes = [checkpoint.shape(part) for part in layer]
        kinds = [checkpoint.kind(part) for part in layer]
        groups = _whole_panels([shape[0] for shape in shapes])
        return packed_bytes(
            [(sum(shapes[i][0] for i in group), shapes[group[0]][1]) for group in groups],
            [
                WeightFormat.MXFP4
                if in_mxfp4 and name in OFFLOADED
                else _format_for(_common_kind([kinds[i] for i in group]), option)
                for group in groups
            ],
        )

    sizes = {name: sum(size(name, layer) for layer in layers) for name, layers in sources.items()}
    latent = checkpoint.config.latent
    if latent is not None:  # what is multiplied head by head, in float32 at most
        numbers = (
            checkpoint.config.query_heads * latent.rank * (latent.plain_dim + latent.value_dim)
        )
        sizes["heads"] = 4 * numbers * checkpoint.config.layers
    return PackedSize(sum(sizes.values()), sum(sizes.get(name, 0) for name in OFFLOADED))


def _matrix_sources(checkpoint: TensorSource) -> dict[str, list[list[str]]]:
    """Return the names of tensors that are packed together, in order, by what they become."""
    config, names = checkpoint.config, set(checkpoint.names())
    outer = {"embed": ("embed",), "head": ("lm_head",), **OUTER_MATRICES}
    sources = {name: [[f"{part}.weight"] for part in parts] for name, parts in outer.items()} | {
        name: [[f"layers.{i}.{part}.weight" for part in parts] for i in range(config.layers)]
        for name, parts in _MATRICES.items()
    }
    present = {
        name: [held for layer in layers if (held := [part for part in layer if part in names])]
        for name, layers in (sources | expert_sources(config, names)).items()
    }
    return {name: layers for name, layers in present.items() if layers}


def _format_for(kind: str, option: WeightsOption) -> WeightFormat:
    """Return the format that an option means for matrices of a stored kind."""
    natural = natural_format(kind)
    if option == "auto":
        return natural
    if option == "f32":
        return WeightFormat.F32
    rounded = WeightFormat.Q4_1 if option == "q4" else WeightFormat.Q8_0
    exact = natural is not WeightFormat.F32 and LAYOUTS[natural].bits <= LAYOUTS[rounded].bits
    return natural if exact else rounded


def block_format(checkpoint: "Checkpoint", option: WeightsOption) -> WeightFormat:
    """Return the least precise format among the matrices of the first decoder layer."""
    names = set(checkpoint.names())
    parts = [f"layers.0.{part}.weight" for parts in _MATRICES.values() for part in parts]
    parts += [f"layers.0.experts.0.{part}.weight" for part in ("gate", "up", "down")]
    return min(_format_for(checkpoint.kind(n), option) for n in parts if n in names)


def allocate_zeros(name: str, size: int) -> Uint8Array:
    zeros: Uint8Array = aligned_zeros(size, np.uint8)
    return zeros


def pack_weights(
    checkpoint: TensorSource,
    option: WeightsOption,
    progress: Progress,
    allocate: Allocate = allocate_zeros,
) -> dict[str, npt.NDArray[np.generic]]:
    config = checkpoint.config
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    sources = _matrix_sources(checkpoint)
    in_mxfp4 = option != "f32" and is_mxfp4(sources, lambda name: checkpoint.tensor(name).kind)
    done, steps = 0, sum(map(len, sources.values()))
    for name, layers in sources.items():
        tensors = [
            _with_whole_panels([checkpoint.tensor(part) for part in layer]) for layer in layers
        ]
        own = WeightFormat.MXFP4 if in_mxfp4 and name in OFFLOADED else None
        stacked = _Stacking(
            tensors, option, partial(allocate, name), name in _INTERLEAVED, weight_format=own
        )
        try:
            for _ in stacked.pack():
                done += 1
                progress("packing weights", done, steps)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path}: {error}; download it again") from None
        arrays[name], arrays[f"{name}.panels"] = stacked.data, stacked.panels
    others = {
        name: _Stacking(tensors, option, partial(allocate, name))
        for name, tensors in head_tensors(config, checkpoint.tensor).items()
    }
    if config.experts is not None:
        routers = router_tensors(config, checkpoint.tensor)
        others[ROUTER] = _Stacking(routers, "f32", partial(allocate, ROUTER))
    for name, stacked in others.items():
        for _ in stacked.pack():
            pass
        arrays[name], arrays[f"{name}.panels"] = stacked.data, stacked.panels
    arrays.update(_vectors(checkpoint, set(checkpoint.names())))
    return arrays


def _whole_panels(rows: list[int]) -> list[list[int]]:
    """Return which matrices, one below the other, are packed as one, so that all but the last fill
    whole panels.

    Args:
        rows: of each matrix.
    """
    groups: list[list[int]] = []
    held = 0
    for number, count in enumerate(rows):
        if held % PANEL:
            groups[-1].append(number)
        else:
            groups.append([number])
        held += count
    return groups


def _common_kind(kinds: list[str]) -> str:
    """Return the kind of matrices that are packed as one: float32 where they differ."""
    return kinds[0] if len(set(kinds)) == 1 else "f32"


def _with_whole_panels(tensors: list[StoredTensor]) -> list[StoredTensor]:
    groups = _whole_panels([tensor.shape[0] for tensor in tensors])
    return [_join([tensors[number] for number in group]) for group in groups]


def _join(tensors: list[StoredTensor]) -> StoredTensor:
    """Return matrices below each other as one."""
    if len(tensors) == 1:
        return tensors[0]
    first, kind = tensors[0], _common_kind([tensor.kind for tensor in tensors])
    parts = [tensor.data if tensor.kind == kind else tensor.to_float32() for tensor in tensors]
    shape = (sum(tensor.shape[0] for tensor in tensors), first.shape[1])
    names = " and ".join(tensor.name for tensor in tensors)
    return StoredTensor(names, shape, kind, np.concatenate(parts))


class _Stacking:
    """Packs one matrix of all layers into one array.

    Args:
        layers: tensors that are packed together, of each layer.
        option: see ``load_packed``.
        allocate: returns zeros of a size.
        interleaved: see ``packing.pack``.
        weight_format: of all matrices; None is what the option means for each.

    Attributes:
        data: uint8, the layers' panels.
        panels: int64 [layers * panels, 2], see ``LinearWeights``.
    """

    def __init__(
        self,
        layers: list[list[StoredTensor]],
        option: WeightsOption,
        allocate: Callable[[int], Uint8Array],
        interleaved: bool = False,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self._layers = layers
        self._interleaved = interleaved
        self._formats = [
            [
                _format_for(part.kind, option) if weight_format is None else weight_format
                for part in layer
            ]
            for layer in layers
        ]
        shapes = [[part.shape for part in layer] for layer in layers]
        pairs = zip(shapes, self._formats, strict=True)
        self._sizes = [packed_bytes(shape, formats) for shape, formats in pairs]
        self.data = allocate(sum(self._sizes))
        self.panels: Int64Array = np.zeros((0, 2), np.int64)

    def pack(self) -> Iterator[None]:
        """Pack, several layers at a time; yield after every layer.

        Raises:
            ValueError: see ``packing.pack``.
        """
        ends = np.cumsum(self._sizes).tolist()
        parts = [self.data[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]
        panels = []
        threads = available_threads()
        following = [*self._layers[threads:], *([[]] * threads)]
        with ThreadPoolExecutor(threads) as pool:
            packed = pool.map(
                partial(_pack_layer, self._interleaved), self._layers, self._formats, parts,
                following,
            )  # fmt: skip
            for matrix, part_end in zip(packed, ends, strict=True):
                matrix.panels[:, 0] += part_end - len(matrix.data)
                panels.append(matrix.panels)
                yield
        self.panels = np.concatenate(panels)


def _pack_layer(
    interleaved: bool,
    tensors: list[StoredTensor],
    formats: list[WeightFormat],
    out: Uint8Array,
    following: list[StoredTensor],
) -> PackedMatrix:
    """Pack one layer's matrices, while those that this thread packs next are read from disk."""
    for tensor in following:
        read_ahead(tensor.data)
    matrix = pack(tensors, formats, out, interleaved)
    for tensor in tensors:
        release_pages(tensor.data)
    return matrix


def _vectors(checkpoint: TensorSource, names: set[str]) -> dict[str, npt.NDArray[np.generic]]:
    """Return biases and norm weights, layers one after the other; absent biases are zeros."""
    config = checkpoint.config
    kv = config.kv_heads * config.head_dim
    queries = config.query_heads * config.head_dim

    def vector(name: str, size: int) -> npt.NDArray[np.float32]:
        if name not in names:
            return np.zeros(size, np.float32)
        # A copy: to Numba, a read-only map has another type than an array from the cache, and the
        # kernels would be compiled for both.
        return np.array(checkpoint.tensor(name).to_float32()).reshape(-1)

    def layers(*parts: tuple[str, int]) -> npt.NDArray[np.float32]:
        return np.concatenate(
            [
                vector(f"layers.{i}.{part}", size)
                for i in range(config.layers)
                for part, size in parts
            ]
        )

    post_norms = {}
    if config.post_norms:
        for name in ("attn_post_norm", "mlp_post_norm"):
            post_norms[name] = layers((f"{name}.weight", config.hidden))
            post_norms[f"{name}_bias"] = layers((f"{name}.bias", config.hidden))
    return {
        "qkv_bias": layers(("q.bias", queries), ("k.bias", kv), ("v.bias", kv)),
        "o_bias": layers(("o.bias", config.hidden)),
        "gate_bias": layers(("gate.bias", config.ffn)),
        "up_bias": layers(("up.bias", config.ffn)),
        "down_bias": layers(("down.bias", config.hidden)),
        "head_bias": np.zeros(panel_count(config.vocab) * PANEL, np.float32),
        "attn_norm": layers(("attn_norm.weight", config.hidden)),
        "attn_norm_bias": layers(("attn_norm.bias", config.hidden)),
        "mlp_norm": layers(("mlp_norm.weight", config.hidden)),
        "mlp_norm_bias": layers(("mlp_norm.bias", config.hidden)),
        "final_norm": vector("final_norm.weight", config.hidden),
        "final_norm_bias": vector("final_norm.bias", config.hidden),
        **post_norms,
        **latent_norms(config, checkpoint.tensor),
        **state_vectors(config, checkpoint.tensor),
        **router_corrections(config, checkpoint.tensor),
        **expert_biases(config, checkpoint.tensor),
        **altup_vectors(config, checkpoint.tensor),
        **({"sinks": layers(("attn.sinks", config.query_heads))} if config.sinks else {}),
        "q_norm": layers(("q_norm.weight", config.q_norm_size)),
        "k_norm": layers(("k_norm.weight", config.k_norm_size)),
    }
