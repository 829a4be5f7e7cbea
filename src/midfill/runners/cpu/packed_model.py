"""A checkpoint's weights in the CPU kernels' form, packed once and kept in the user's cache."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from midfill.config import WeightsOption
from midfill.errors import CheckpointError, MidfillError
from midfill.kernels.cpu.decoder_data import DecoderConfig, DecoderWeights
from midfill.kernels.cpu.experts.table import SWIGLU_OAI, ExpertWeights
from midfill.kernels.cpu.latent.data import LatentWeights
from midfill.kernels.cpu.linear import GELU_TANH, SILU, GateUpWeights, LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Int64Array, Uint8Array, aligned_zeros
from midfill.kernels.cpu.packing import PackedMatrix, natural_format, pack, packed_bytes
from midfill.kernels.cpu.rows import LAYER, RMS, NormWeights, RopeTables
from midfill.kernels.cpu.state_space.data import StateWeights
from midfill.kernels.cpu.weight_formats import LAYOUTS, PANEL, WeightFormat, panel_count
from midfill.models.config import ModelConfig
from midfill.runners.cpu.packed_arrays import Arrays, ArrayWriter, read_arrays, write_arrays
from midfill.runners.cpu.packed_experts import (
    INTERLEAVED,
    OFFLOADED,
    ROUTER,
    assemble_experts,
    expert_biases,
    expert_sources,
    is_mxfp4,
    router_corrections,
    router_tensors,
    unsupported_experts,
)
from midfill.runners.cpu.packed_latent import (
    ABSORB,
    EXPAND,
    QUERY,
    assemble_latent,
    head_tensors,
    latent_norms,
    unsupported_latent,
)
from midfill.runners.cpu.packed_state_space import (
    OUTPUT,
    PROJECT,
    assemble_state_space,
    state_vectors,
    unsupported_state_space,
)
from midfill.runners.rope import model_tables
from midfill.stored_tensor import StoredTensor
from midfill.system.cache import cache_folder, mark_used, remove_unused, store_file
from midfill.system.files import read_ahead, release_pages, replacing_file
from midfill.system.machine import available_threads
from midfill.system.process import start_in_background
from midfill.system.progress import Progress, ignore_progress

if TYPE_CHECKING:  # kernels are compiled before its libraries are installed
    from midfill.models.checkpoints.checkpoint import Checkpoint

PACKING_VERSION = 6
_MAX_STORED_AT_ONCE = 1 << 28
"""Bytes that are written before a model counts as loaded."""

_MATRICES = {
    "qkv": ("q", "q_a", "k", "v", "kv_a"),
    QUERY: ("q_b",),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    PROJECT: ("ssm_in",),
    OUTPUT: ("ssm_out",),
}
"""The checkpoint's matrices that are packed as one, by the name under which they are kept.

A model has some of them."""
_INTERLEAVED = ("gate_up", *INTERLEAVED)
"""The kernel reads a panel of each in turn."""

_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "swiglu_oai": SWIGLU_OAI}


@dataclass(frozen=True)
class PackedModel:
    """A model as the compiled forward pass takes it.

    Attributes:
        config: sizes and switches.
        weights: the weights, one copy.
        experts: the mixtures of experts, of layers that have one.
        latent: latent attention, of models that have it.
        states: layers with a state, of models that have any. Weights of attention are those of
            the other layers then, and ``config`` counts these.
        experts_on_disk: whether the experts' matrices are read from a file, see ``load_packed``.
        sinks: float32 [layers * query_heads], see kernels/cpu/sinks.py; None without.
    """

    config: DecoderConfig
    weights: DecoderWeights
    experts: ExpertWeights | None = None
    latent: LatentWeights | None = None
    states: StateWeights | None = None
    experts_on_disk: bool = False
    sinks: Float32Array | None = None

    @property
    def matrices(self) -> dict[str, LinearWeights]:
        """All matrices by name; no gate where the MLP has none, no MLP where no layer has one."""
        states = self.states
        own = {} if states is None else {PROJECT: states.project, OUTPUT: states.output}
        return self._dense_matrices | self._latent_matrices | self._expert_matrices | own

    @property
    def _latent_matrices(self) -> dict[str, LinearWeights]:
        latent = self.latent
        if latent is None:
            return {}
        query = {QUERY: latent.query} if latent.sizes.query_rank else {}
        heads = {ABSORB: latent.absorb, EXPAND: latent.expand}
        return {"qkv": latent.project} | query | heads

    @property
    def _expert_matrices(self) -> dict[str, LinearWeights]:
        experts = self.experts
        if experts is None:
            return {}
        matrices = {
            "router": experts.router, "experts_in": experts.gate_up, "experts_out": experts.down,
        }  # fmt: skip
        if len(experts.shared_down.panels) == 0:
            return matrices
        return matrices | {
            "shared_gate": experts.shared.gate, "shared_up": experts.shared.up,
            "shared_down": experts.shared_down,
        }  # fmt: skip

    @property
    def _dense_matrices(self) -> dict[str, LinearWeights]:
        weights = self.weights
        gate = {"gate": weights.gate_up.gate} if weights.gate_up.gated else {}
        matrices = {
            "embed": weights.embed, "head": weights.head, "qkv": weights.qkv, "o": weights.o,
        }  # fmt: skip
        if len(weights.down.panels) == 0:
            return matrices
        mlp = gate | {"up": weights.gate_up.up, "down": weights.down}
        if self.experts is not None:  # the panels of a dense layer stand for those of others, too
            mlp = {name: _without_repeats(matrix) for name, matrix in mlp.items()}
        return matrices | mlp

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied embedding counts once."""
        parts = (self.weights, self.experts or (), self.latent or (), self.states or ())
        arrays = {id(array): array for array in _arrays(parts)}
        return sum(array.nbytes for array in arrays.values())


def _without_repeats(matrix: LinearWeights) -> LinearWeights:
    """Return a matrix each of whose panels is listed once."""
    first = np.unique(matrix.panels[:, 0], return_index=True)[1]
    return matrix._replace(panels=matrix.panels[np.sort(first)])


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


def unsupported_reason(config: ModelConfig) -> str | None:
    """Return why the CPU kernels can't run this architecture, or None if they can."""
    if config.activation not in _ACTIVATIONS:
        return f"activation {config.activation}"
    if config.activation == "swiglu_oai" and len(config.expert_layers) < config.layers:
        return f"activation {config.activation} in a layer without experts"
    if config.experts is not None and (reason := unsupported_experts(config, config.experts)):
        return reason
    if config.latent is not None and (reason := unsupported_latent(config.latent)):
        return reason
    if config.state_space is not None and (reason := unsupported_state_space(config.state_space)):
        return reason
    sizes = [("hidden", config.hidden), ("head_dim", config.head_dim)]
    experts = config.experts
    if len(config.expert_layers) < config.layers:
        sizes.append(("ffn", config.ffn))
    if experts is not None:
        sizes += [("experts' ffn", experts.ffn), ("the shared expert's ffn", experts.shared_ffn)]
    for name, size in sizes:
        if size % PANEL:
            return f"{name} = {size} is not a multiple of {PANEL}"
    return None


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

    def weight_format(name: str, part: str) -> WeightFormat:
        if in_mxfp4 and name in OFFLOADED:
            return WeightFormat.MXFP4
        return _format_for(checkpoint.kind(part), option)

    sizes = {
        name: sum(
            packed_bytes(
                [checkpoint.shape(part) for part in layer],
                [weight_format(name, part) for part in layer],
            )
            for layer in layers
        )
        for name, layers in sources.items()
    }
    latent = checkpoint.config.latent
    if latent is not None:  # what is multiplied head by head, in float32 at most
        numbers = (
            checkpoint.config.query_heads * latent.rank * (latent.plain_dim + latent.value_dim)
        )
        sizes["heads"] = 4 * numbers * checkpoint.config.layers
    return PackedSize(sum(sizes.values()), sum(sizes.get(name, 0) for name in OFFLOADED))


def load_packed(
    checkpoint: "Checkpoint",
    option: WeightsOption = "auto",
    progress: Progress | None = None,
    folder: Path | None = None,
    *,
    offload_experts: bool = False,
) -> PackedModel:
    """Load weights, from the cache if this checkpoint was packed before.

    Args:
        checkpoint: the model.
        option: "auto" keeps stored weights exactly, but for a few kinds that are rounded to eight
            bits (see ``natural_format``); "q4" and "q8" round matrices of more bits, "f32"
            dequantises all.
        progress: called with (stage, done, total).
        folder: where packed weights are kept; None is the user's cache.
        offload_experts: whether the matrices of experts stay on disk. The kernels read them from
            there; the system keeps in memory what is read most, as far as there is room.

    Raises:
        CheckpointError: the checkpoint is broken or has a shape the kernels can't run.
        MidfillError: experts are to stay on disk, and can't be written there.
    """
    reason = unsupported_reason(checkpoint.config)
    if reason is not None:
        raise CheckpointError(
            f"{checkpoint.path}: the CPU kernels can't run this model ({reason}); "
            "use --backend torch"
        )
    path = (
        folder or cache_folder() / "packed"
    ) / f"{checkpoint.fingerprint}-{option}-v{PACKING_VERSION}.safetensors"
    progress = progress or ignore_progress
    mapped = OFFLOADED if offload_experts else ()
    arrays = read_arrays(path, progress, mapped)
    if arrays is None and offload_experts:
        try:
            with replacing_file(path) as temporary:
                _pack_into(ArrayWriter(temporary), checkpoint, option, progress)
        except OSError as error:
            raise MidfillError(
                f"{path}: the experts can't be written there ({error.strerror}); they stay on disk"
                " since the model is larger than the memory"
            ) from None
        arrays = read_arrays(path, progress, mapped)
    if arrays is None:
        arrays = _pack_all(checkpoint, option, progress)
        _store(path, arrays)
    else:
        mark_used(path)
    return replace(_assemble(checkpoint.config, arrays), experts_on_disk=offload_experts)


def _pack_into(
    writer: ArrayWriter, checkpoint: TensorSource, option: WeightsOption, progress: Progress
) -> None:
    """Pack a model into a file, the matrices of experts in the file itself."""

    def allocate(name: str, size: int) -> Uint8Array:
        return writer.make(name, size) if name in OFFLOADED else _allocate(name, size)

    writer.finish(_pack_all(checkpoint, option, progress, allocate))


def pack_model(source: TensorSource) -> PackedModel:
    """Return a model's weights, packed anew and kept nowhere."""
    return _assemble(source.config, _pack_all(source, "auto", ignore_progress))


def _store(path: Path, arrays: Arrays) -> None:
    """Keep packed weights for the next start; those of gigabytes beside the first requests."""

    def store() -> None:
        store_file(path, lambda file: write_arrays(file, arrays))
        remove_unused(path.parent)

    if sum(array.nbytes for array in arrays.values()) <= _MAX_STORED_AT_ONCE:
        store()
    else:
        start_in_background(store, "store packed weights")


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


Allocate = Callable[[str, int], Uint8Array]
"""Returns zeros for packed matrices, by name and size."""


def _allocate(name: str, size: int) -> Uint8Array:
    zeros: Uint8Array = aligned_zeros(size, np.uint8)
    return zeros


def _matrix_sources(checkpoint: TensorSource) -> dict[str, list[list[str]]]:
    """Return the names of tensors that are packed together, in order, by what they become."""
    config, names = checkpoint.config, set(checkpoint.names())
    sources = {"embed": [["embed.weight"]], "head": [["lm_head.weight"]]} | {
        name: [[f"layers.{i}.{part}.weight" for part in parts] for i in range(config.layers)]
        for name, parts in _MATRICES.items()
    }
    present = {
        name: [held for layer in layers if (held := [part for part in layer if part in names])]
        for name, layers in (sources | expert_sources(config, names)).items()
    }
    return {name: layers for name, layers in present.items() if layers}


def _pack_all(
    checkpoint: TensorSource,
    option: WeightsOption,
    progress: Progress,
    allocate: Allocate = _allocate,
) -> dict[str, npt.NDArray[np.generic]]:
    config = checkpoint.config
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    sources = _matrix_sources(checkpoint)
    in_mxfp4 = option != "f32" and is_mxfp4(sources, lambda name: checkpoint.tensor(name).kind)
    done, steps = 0, sum(map(len, sources.values()))
    for name, layers in sources.items():
        tensors = [[checkpoint.tensor(part) for part in layer] for layer in layers]
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
        **({"sinks": layers(("attn.sinks", config.query_heads))} if config.sinks else {}),
        "q_norm": layers(("q_norm.weight", config.head_dim)),
        "k_norm": layers(("k_norm.weight", config.head_dim)),
    }


def _assemble(config: ModelConfig, arrays: dict[str, Any]) -> PackedModel:
    stack = _Stack(config, arrays)
    hidden, ffn = config.hidden, config.ffn
    value_dim = config.head_dim if config.latent is None else config.latent.value_dim
    values = config.query_heads * value_dim
    head = "head" if "head" in arrays else "embed"
    tables = model_tables(config)
    first = [config.context * config.is_local(layer) for layer in range(config.layers)]
    windows = [config.window_of(layer) or 0 for layer in range(config.layers)]
    weights = DecoderWeights(
        embed=stack.linear("embed", "head_bias", config.vocab, hidden),
        head=stack.linear(head, "head_bias", config.vocab, hidden),
        qkv=stack.attended(),
        o=stack.linear("o", "o_bias", hidden, values),
        gate_up=GateUpWeights(
            gate=stack.part("gate_up", 0, 1 + config.gated_mlp, "gate_bias", ffn, hidden),
            up=stack.part("gate_up", -1, 1 + config.gated_mlp, "up_bias", ffn, hidden),
            activation=_ACTIVATIONS[config.activation],
            gated=config.gated_mlp,
        ),
        down=stack.part("down", 0, 1, "down_bias", hidden, ffn),
        attn_norm=stack.attention_norm(),
        mlp_norm=stack.norm("mlp_norm"),
        final_norm=stack.norm("final_norm"),
        attn_post_norm=stack.norm("attn_post_norm"),
        mlp_post_norm=stack.norm("mlp_post_norm"),
        q_norm=stack.head_norm("q_norm"),
        k_norm=stack.head_norm("k_norm"),
        rope=RopeTables(
            cos=np.concatenate([cos.reshape(-1) for cos, _ in tables]),
            sin=np.concatenate([sin.reshape(-1) for _, sin in tables]),
            half=tables[0][0].shape[1],
            first=np.array(first, np.int32),
        ),
        windows=np.array(windows, np.int32),
    )
    return PackedModel(
        _decoder_config(config),
        weights,
        assemble_experts(config, arrays),
        assemble_latent(config, arrays),
        assemble_state_space(config, arrays),
        sinks=arrays["sinks"] if config.sinks else None,
    )


class _Stack:
    """Builder of the kernels' structures from the cached arrays, which hold all layers."""

    def __init__(self, config: ModelConfig, arrays: dict[str, Any]) -> None:
        self._config = config
        self._arrays = arrays

    def linear(self, name: str, bias: str, outputs: int, inputs: int) -> LinearWeights:
        """Return a matrix with its bias; without weights if the model has no such matrix."""
        return LinearWeights(
            packed=self._arrays.get(name, np.zeros(0, np.uint8)),
            panels=self._arrays.get(f"{name}.panels", np.zeros((0, 2), np.int64)),
            bias=self._arrays[bias],
            outputs=outputs,
            inputs=inputs,
        )

    def attended(self) -> LinearWeights:
        """Return what computes queries, keys and values.

        In latent attention it has no weights, only the size of a row of absorbed queries.
        """
        config = self._config
        queries, keys = (heads * config.head_dim for heads in (config.query_heads, config.kv_heads))
        if config.latent is None:
            return self.linear("qkv", "qkv_bias", queries + 2 * keys, config.hidden)
        return self.linear("no matrix", "qkv_bias", queries, config.hidden)

    def part(
        self, name: str, index: int, parts: int, bias: str, outputs: int, inputs: int
    ) -> LinearWeights:
        """Return one of several matrices of that shape which are packed together.

        Only layers without experts have them. The panels of others are never read.
        """
        matrix = self.linear(name, bias, outputs, inputs)
        if len(matrix.panels) == 0:
            return matrix
        dense = [i for i in range(self._config.layers) if self._config.experts_of(i) is None]
        panels = matrix.panels.reshape(len(dense), parts, -1, 2)
        of_layer = np.maximum(np.searchsorted(dense, range(self._config.layers), "right") - 1, 0)
        own = np.ascontiguousarray(panels[of_layer, index]).reshape(-1, 2)
        return matrix._replace(panels=own)

    def norm(self, name: str) -> NormWeights:
        """Return a norm of hidden rows; without weights if the model has no such norm."""
        nothing = np.zeros(0, np.float32)
        return NormWeights(
            weight=self._arrays.get(name, nothing),
            bias=self._arrays.get(f"{name}_bias", nothing),
            size=self._config.hidden,
            kind=LAYER if self._config.norm == "layer" else RMS,
            epsilon=self._config.norm_epsilon,
        )

    def attention_norm(self) -> NormWeights:
        """Return the norm before attention, of the layers that have attention."""
        norm, config = self.norm("attn_norm"), self._config
        if config.state_space is None:
            return norm
        weight = norm.weight.reshape(config.layers, -1)[list(config.attention_layers)]
        return norm._replace(weight=weight.reshape(-1))

    def head_norm(self, name: str) -> NormWeights:
        """Return the RMSNorm of each query or key head."""
        return NormWeights(
            weight=self._arrays[name],
            bias=np.zeros(0, np.float32),
            size=self._config.head_dim,
            kind=RMS,
            epsilon=self._config.norm_epsilon,
        )


def _decoder_config(config: ModelConfig) -> DecoderConfig:
    return DecoderConfig(
        layers=len(config.attention_layers),
        hidden=config.hidden,
        query_heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        qk_norm=config.qk_norm,
        post_norms=config.post_norms,
        score_scale=config.score_scale,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_multiplier=1.0 / config.logits_divisor,
    )


def _arrays(weights: Any) -> Iterator[npt.NDArray[np.generic]]:
    """Yield all arrays of nested named tuples."""
    for field in weights:
        if isinstance(field, tuple):
            yield from _arrays(field)
        elif isinstance(field, np.ndarray):
            yield field
