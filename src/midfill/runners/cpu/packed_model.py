"""A checkpoint's weights in the CPU kernels' form, packed once and kept in the user's cache."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from midfill.config import WeightsOption
from midfill.errors import CheckpointError, MidfillError
from midfill.kernels.cpu.altup.data import AltUpWeights
from midfill.kernels.cpu.decoder_data import DecoderConfig, DecoderWeights
from midfill.kernels.cpu.experts.table import SWIGLU_OAI, ExpertWeights
from midfill.kernels.cpu.latent.data import LatentWeights
from midfill.kernels.cpu.linear import GELU_TANH, SILU, GateUpWeights, LinearWeights
from midfill.kernels.cpu.memory import Float32Array, Uint8Array
from midfill.kernels.cpu.rows import LAYER, RMS, NormWeights, RopeTables
from midfill.kernels.cpu.state_space.data import DeltaWeights, StateWeights
from midfill.kernels.cpu.weight_formats import PANEL
from midfill.models.config import DeltaRule, ModelConfig, StateSpace
from midfill.runners.cpu.packed_altup import (
    LAYER_MATRICES,
    assemble_altup,
    projections_of_others,
    unsupported_altup,
)
from midfill.runners.cpu.packed_arrays import Arrays, ArrayWriter, read_arrays, write_arrays
from midfill.runners.cpu.packed_delta_rule import (
    QUERY_GATE,
    assemble_delta_rule,
    unsupported_delta_rule,
)
from midfill.runners.cpu.packed_experts import (
    OFFLOADED,
    assemble_experts,
    unsupported_experts,
)
from midfill.runners.cpu.packed_latent import (
    ABSORB,
    EXPAND,
    QUERY,
    assemble_latent,
    unsupported_latent,
)
from midfill.runners.cpu.packed_matrices import (
    NOTHING,
    identity_norm,
    packed_matrix,
    rms_norm,
)
from midfill.runners.cpu.packed_state_space import (
    OUTPUT,
    PROJECT,
    assemble_state_space,
    unsupported_state_space,
)
from midfill.runners.cpu.weight_packing import TensorSource, allocate_zeros, pack_weights
from midfill.runners.rope import model_tables
from midfill.system.cache import cache_folder, mark_used, remove_unused, store_file
from midfill.system.files import replacing_file
from midfill.system.process import start_in_background
from midfill.system.progress import Progress, ignore_progress

if TYPE_CHECKING:  # kernels are compiled before its libraries are installed
    from midfill.models.checkpoints.checkpoint import Checkpoint

PACKING_VERSION = 6
_MAX_STORED_AT_ONCE = 1 << 28
"""Bytes that are written before a model counts as loaded."""

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
        altup: streams of hidden rows, of models that have them. Projections to queries, keys and
            values are those of the layers that keep KV then, and ``config`` counts these.
    """

    config: DecoderConfig
    weights: DecoderWeights
    experts: ExpertWeights | None = None
    latent: LatentWeights | None = None
    states: StateWeights | DeltaWeights | None = None
    experts_on_disk: bool = False
    sinks: Float32Array | None = None
    altup: AltUpWeights | None = None

    @property
    def matrices(self) -> dict[str, LinearWeights]:
        """All matrices by name; no gate where the MLP has none, no MLP where no layer has one."""
        states = self.states
        own = {} if states is None else {PROJECT: states.project, OUTPUT: states.output}
        if isinstance(states, DeltaWeights):
            own[QUERY_GATE] = states.query_gate
        parts = (self._latent_matrices, self._expert_matrices, self._stream_matrices, own)
        return self._dense_matrices | {name: each for part in parts for name, each in part.items()}

    @property
    def _stream_matrices(self) -> dict[str, LinearWeights]:
        altup = self.altup
        if altup is None:
            return {}
        names = (*LAYER_MATRICES, "layer_embed", "layer_project", "spread", "gather")
        query = {QUERY: altup.query} if len(altup.query.panels) else {}
        return query | {name: getattr(altup, name) for name in names}

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
        others = (self.experts, self.latent, self.states, self.altup)
        parts = (self.weights, *(other or () for other in others))
        arrays = {id(array): array for array in _arrays(parts)}
        return sum(array.nbytes for array in arrays.values())


def _without_repeats(matrix: LinearWeights) -> LinearWeights:
    """Return a matrix each of whose panels is listed once."""
    first = np.unique(matrix.panels[:, 0], return_index=True)[1]
    return matrix._replace(panels=matrix.panels[np.sort(first)])


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
    if reason := _unsupported_states(config):
        return reason
    if config.altup is not None and (reason := unsupported_altup(config, config.altup)):
        return reason
    if config.altup is None and _needs_streams(config):
        return "shared KV, norms of values, cut gates or capped logits without streams"
    if config.joint_qk_norm and (config.latent or config.state_space):
        return "norms over all heads beside latent attention or states"
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


def _needs_streams(config: ModelConfig) -> bool:
    """Return whether only the forward pass of models with streams knows what a model has."""
    return bool(
        config.kv_sharing_layers or config.value_norms or config.gate_cutoffs or config.logits_cap
    )


def _unsupported_states(config: ModelConfig) -> str | None:
    """Return why the kernels can't run a model's layers with a state, or None if they can."""
    match config.state_space:
        case StateSpace() as space:
            return unsupported_state_space(space)
        case DeltaRule() as rule:
            return unsupported_delta_rule(rule)
    return "gated attention in all layers" if config.gated_attention else None


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
    path = packed_path(checkpoint, option, folder)
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
        arrays = pack_weights(checkpoint, option, progress)
        _store(path, arrays)
    else:
        mark_used(path)
    return replace(_assemble(checkpoint.config, arrays), experts_on_disk=offload_experts)


def packed_path(
    checkpoint: "Checkpoint", option: WeightsOption = "auto", folder: Path | None = None
) -> Path:
    """Return where ``load_packed`` keeps weights for later starts."""
    name = f"{checkpoint.fingerprint}-{option}-v{PACKING_VERSION}.safetensors"
    return (folder or cache_folder() / "packed") / name


def _pack_into(
    writer: ArrayWriter, checkpoint: TensorSource, option: WeightsOption, progress: Progress
) -> None:
    """Pack a model into a file, the matrices of experts in the file itself."""

    def allocate(name: str, size: int) -> Uint8Array:
        return writer.make(name, size) if name in OFFLOADED else allocate_zeros(name, size)

    writer.finish(pack_weights(checkpoint, option, progress, allocate))


def pack_model(source: TensorSource) -> PackedModel:
    """Return a model's weights, packed anew and kept nowhere."""
    return _assemble(source.config, pack_weights(source, "auto", ignore_progress))


def _store(path: Path, arrays: Arrays) -> None:
    """Keep packed weights for the next start; those of gigabytes beside the first requests."""

    def store() -> None:
        store_file(path, lambda file: write_arrays(file, arrays))
        remove_unused(path.parent)

    if sum(array.nbytes for array in arrays.values()) <= _MAX_STORED_AT_ONCE:
        store()
    else:
        start_in_background(store, "store packed weights")


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
        mlp_norm=stack.pre_norm("mlp_norm"),
        final_norm=stack.norm("final_norm"),
        attn_post_norm=stack.norm("attn_post_norm"),
        mlp_post_norm=stack.norm("mlp_post_norm"),
        q_norm=stack.head_norm("q_norm", config.q_norm_size),
        k_norm=stack.head_norm("k_norm", config.k_norm_size),
        rope=RopeTables(
            cos=np.concatenate([cos.reshape(-1) for cos, _ in tables]),
            sin=np.concatenate([sin.reshape(-1) for _, sin in tables]),
            half=tables[0][0].shape[1],
            first=np.array(first, np.int32),
        ),
        windows=np.array(windows, np.int32),
    )
    if config.altup is not None:
        weights = weights._replace(qkv=projections_of_others(config, weights.qkv))
    return PackedModel(
        _decoder_config(config),
        weights,
        assemble_experts(config, arrays),
        assemble_latent(config, arrays),
        _assemble_states(config, arrays),
        sinks=arrays["sinks"] if config.sinks else None,
        altup=assemble_altup(config, arrays),
    )


def _assemble_states(
    config: ModelConfig, arrays: dict[str, Any]
) -> StateWeights | DeltaWeights | None:
    match config.state_space:
        case StateSpace() as space:
            return assemble_state_space(config, space, arrays)
        case DeltaRule() as rule:
            return assemble_delta_rule(config, rule, arrays)
    return None


class _Stack:
    """Builder of the kernels' structures from the cached arrays, which hold all layers."""

    def __init__(self, config: ModelConfig, arrays: dict[str, Any]) -> None:
        self._config = config
        self._arrays = arrays

    def linear(self, name: str, bias: str, outputs: int, inputs: int) -> LinearWeights:
        """Return a matrix with its bias; without weights if the model has no such matrix."""
        return packed_matrix(self._arrays, name, outputs, inputs, self._arrays[bias])

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
        return NormWeights(
            weight=self._arrays.get(name, NOTHING),
            bias=self._arrays.get(f"{name}_bias", NOTHING),
            size=self._config.hidden,
            kind=LAYER if self._config.norm == "layer" else RMS,
            epsilon=self._config.norm_epsilon,
        )

    def pre_norm(self, name: str) -> NormWeights:
        """Return the norm before attention or an MLP; the identity if the model has none."""
        norm = self.norm(name)
        return norm if self._config.pre_norms else identity_norm(norm)

    def attention_norm(self) -> NormWeights:
        """Return the norm before attention, of the layers that have attention."""
        norm, config = self.pre_norm("attn_norm"), self._config
        if config.state_space is None:
            return norm
        return norm._replace(weight=self._of_attention(norm.weight))

    def _of_attention(self, weight: Float32Array) -> Float32Array:
        """Return the part of all layers' numbers that is of layers with attention."""
        layers = list(self._config.attention_layers)
        return weight.reshape(self._config.layers, -1)[layers].reshape(-1)

    def head_norm(self, name: str, size: int) -> NormWeights:
        """Return the RMSNorm of each query or key head, of the layers that have attention.

        With ``joint_qk_norm`` it is that of all heads together.
        """
        weight = self._arrays[name]
        own = weight if self._config.state_space is None else self._of_attention(weight)
        return rms_norm(self._config, own, size)


def _decoder_config(config: ModelConfig) -> DecoderConfig:
    return DecoderConfig(
        layers=len(config.kv_layers),
        hidden=config.hidden,
        query_heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        qk_norm=config.qk_norm,
        joint_qk_norm=config.joint_qk_norm,
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
