"""A checkpoint's weights in the CPU kernels' form, packed once and kept in the user's cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.config import WeightsOption
from midfill.errors import CheckpointError
from midfill.kernels.cpu.decoder import DecoderConfig, DecoderWeights
from midfill.kernels.cpu.linear import GELU_TANH, SILU, GateUpWeights, LinearWeights
from midfill.kernels.cpu.memory import aligned
from midfill.kernels.cpu.packing import (
    GROUP,
    PANEL,
    PackedMatrix,
    WeightFormat,
    natural_format,
    pack,
    panel_count,
)
from midfill.kernels.cpu.rows import LAYER, RMS, NormWeights, RopeTables
from midfill.models.config import ModelConfig
from midfill.runners.rope import rope_tables
from midfill.system.cache import cache_folder, mark_used, remove_unused, store_file
from midfill.system.progress import Progress, ignore_progress

PACKING_VERSION = 2

_MATRICES = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate": ("gate",),
    "up": ("up",),
    "down": ("down",),
}
"""The checkpoint's matrices that are packed as one, by the name under which they are kept."""
_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


@dataclass(frozen=True)
class PackedModel:
    """A model as the compiled forward pass takes it.

    Attributes:
        config: sizes and switches.
        weights: the weights, one copy.
    """

    config: DecoderConfig
    weights: DecoderWeights

    @property
    def matrices(self) -> dict[str, LinearWeights]:
        """All matrices by name; no gate where the MLP has none."""
        weights = self.weights
        gate = {"gate": weights.gate_up.gate} if weights.gate_up.gated else {}
        return {
            "embed": weights.embed, "head": weights.head, "qkv": weights.qkv, "o": weights.o,
            **gate, "up": weights.gate_up.up, "down": weights.down,
        }  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied embedding counts once."""
        arrays = {id(array): array for array in _arrays(self.weights)}
        return sum(array.nbytes for array in arrays.values())


def unsupported_reason(config: ModelConfig) -> str | None:
    """Return why the CPU kernels can't run this architecture, or None if they can."""
    if config.activation not in _ACTIVATIONS:
        return f"activation {config.activation}"
    for name, size in (
        ("hidden", config.hidden),
        ("head_dim", config.head_dim),
        ("ffn", config.ffn),
    ):
        if size % PANEL:
            return f"{name} = {size} is not a multiple of {PANEL}"
    return None


def load_packed(
    checkpoint: Checkpoint,
    option: WeightsOption = "auto",
    progress: Progress | None = None,
    folder: Path | None = None,
) -> PackedModel:
    """Load weights, from the cache if this checkpoint was packed before.

    Args:
        checkpoint: the model.
        option: "auto" keeps stored weights exactly, except that K-quants become Q8; other options
            quantise or dequantise every matrix.
        progress: called with (stage, done, total).
        folder: where packed weights are kept; None is the user's cache.

    Raises:
        CheckpointError: the checkpoint is broken or has a shape the kernels can't run.
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
    arrays = _read_cache(path)
    if arrays is None:
        arrays = _pack_all(checkpoint, option, progress or ignore_progress)
        store_file(path, lambda file: _write_cache(file, arrays))
        remove_unused(path.parent)
    else:
        mark_used(path)
    return _assemble(checkpoint.config, arrays)


def _format_for(kinds: list[str], option: WeightsOption) -> WeightFormat:
    """Return the format that an option means for matrices of some stored kinds."""
    if option != "auto":
        return WeightFormat[option.upper()]
    return max(natural_format(kind) for kind in kinds)


def block_format(checkpoint: Checkpoint, option: WeightsOption) -> WeightFormat:
    """Return the least precise format among the matrices of the first decoder layer."""
    names = set(checkpoint.names())
    formats = []
    for parts in _MATRICES.values():
        stored = [name for part in parts if (name := f"layers.0.{part}.weight") in names]
        if stored:
            formats.append(_format_for([checkpoint.tensor(n).kind for n in stored], option))
    return min(formats)


def _pack_all(
    checkpoint: Checkpoint, option: WeightsOption, progress: Progress
) -> dict[str, npt.NDArray[np.generic]]:
    config = checkpoint.config
    names = set(checkpoint.names())
    steps = 2 + config.layers * len(_MATRICES)
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    done = 0

    def store(name: str, matrices: list[PackedMatrix]) -> None:
        arrays[name] = aligned(np.concatenate([matrix.data for matrix in matrices]))
        arrays[f"{name}.format"] = np.array([matrices[0].weight_format], np.int32)

    for name, source in (("embed", "embed.weight"), ("head", "lm_head.weight")):
        if source in names:
            tensor = checkpoint.tensor(source)
            store(name, [pack([tensor], _format_for([tensor.kind], option))])
        done += 1
        progress("packing weights", done, steps)
    for name, parts in _MATRICES.items():
        if f"layers.0.{parts[0]}.weight" not in names:
            continue
        layers = [
            [checkpoint.tensor(f"layers.{i}.{part}.weight") for part in parts]
            for i in range(config.layers)
        ]
        if layers[0][0].shape[1] % GROUP:
            raise CheckpointError(f"{checkpoint.path}: {name} has {layers[0][0].shape[1]} inputs")
        weight_format = _format_for([tensor.kind for layer in layers for tensor in layer], option)
        matrices = []
        for layer in layers:
            matrices.append(pack(layer, weight_format))
            done += 1
            progress("packing weights", done, steps)
        store(name, matrices)
    arrays.update(_vectors(checkpoint, names))
    return arrays


def _vectors(checkpoint: Checkpoint, names: set[str]) -> dict[str, npt.NDArray[np.generic]]:
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
        "q_norm": layers(("q_norm.weight", config.head_dim)),
        "k_norm": layers(("k_norm.weight", config.head_dim)),
    }


def _read_cache(path: Path) -> dict[str, npt.NDArray[np.generic]] | None:
    try:
        with safe_open(path, framework="numpy") as stored:
            # One by one, so that at most one of them is in memory twice.
            return {name: aligned(stored.get_tensor(name)) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return None  # missing, truncated or damaged: packed again and replaced


def _write_cache(path: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
    try:
        save_file(arrays, path)
    except SafetensorError as error:  # of a full disk, too
        raise OSError(str(error)) from error


def _assemble(config: ModelConfig, arrays: dict[str, Any]) -> PackedModel:
    stack = _Stack(config, arrays)
    hidden, ffn = config.hidden, config.ffn
    attended = config.query_heads * config.head_dim
    head = "head" if "head" in arrays else "embed"
    tables = [rope_tables(config, config.context)]
    if config.local_rope_theta is not None:
        tables.append(rope_tables(config, config.context, local=True))
    first = [config.context * config.is_local(layer) for layer in range(config.layers)]
    windows = [config.window_of(layer) or 0 for layer in range(config.layers)]
    weights = DecoderWeights(
        embed=stack.linear("embed", "head_bias", config.vocab, hidden, layers=1),
        head=stack.linear(head, "head_bias", config.vocab, hidden, layers=1),
        qkv=stack.linear(
            "qkv", "qkv_bias", attended + 2 * config.kv_heads * config.head_dim, hidden
        ),
        o=stack.linear("o", "o_bias", hidden, attended),
        gate_up=GateUpWeights(
            gate=stack.linear("gate", "gate_bias", ffn, hidden),
            up=stack.linear("up", "up_bias", ffn, hidden),
            activation=_ACTIVATIONS[config.activation],
            gated=config.gated_mlp,
        ),
        down=stack.linear("down", "down_bias", hidden, ffn),
        attn_norm=stack.norm("attn_norm"),
        mlp_norm=stack.norm("mlp_norm"),
        final_norm=stack.norm("final_norm"),
        attn_post_norm=stack.norm("attn_post_norm"),
        mlp_post_norm=stack.norm("mlp_post_norm"),
        q_norm=stack.head_norm("q_norm"),
        k_norm=stack.head_norm("k_norm"),
        rope=RopeTables(
            cos=np.concatenate([cos.reshape(-1) for cos, _ in tables]),
            sin=np.concatenate([sin.reshape(-1) for _, sin in tables]),
            half=config.head_dim // 2,
            first=np.array(first, np.int32),
        ),
        windows=np.array(windows, np.int32),
    )
    return PackedModel(_decoder_config(config), weights)


class _Stack:
    """Builder of the kernels' structures from the cached arrays, which hold all layers."""

    def __init__(self, config: ModelConfig, arrays: dict[str, Any]) -> None:
        self._config = config
        self._arrays = arrays

    def linear(
        self, name: str, bias: str, outputs: int, inputs: int, layers: int | None = None
    ) -> LinearWeights:
        """Return a matrix with its bias; without weights if the model has no such matrix."""
        packed = self._arrays.get(name, np.zeros(0, np.uint8))
        stored_format = self._arrays.get(f"{name}.format", self._arrays["embed.format"])
        return LinearWeights(
            packed=packed,
            bias=self._arrays[bias],
            format=int(stored_format[0]),
            outputs=outputs,
            inputs=inputs,
            layer_bytes=len(packed) // (layers or self._config.layers),
        )

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
        layers=config.layers,
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
