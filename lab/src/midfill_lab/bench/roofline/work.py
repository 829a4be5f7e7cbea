"""What a step requires: bytes that must be read and operations that must be done, part by part.

Yao Fu's analysis (2024, arXiv 2405.08944) for the CPU kernels: weights are read once per step for
all of its rows (of experts, those that rows are expected to be sent to, if each is as likely), K
and V of every key that a stream's rows see once per stream, and each row takes two operations per
weight, and four per query head, number of a head and key that it sees. Norms, rotary embeddings,
the softmax, embeddings of tokens and what is written aren't counted: they make no step faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from midfill.kernels.cpu.kv_cache import KVCacheDtype, entry_bytes
from midfill.kernels.cpu.linear import LinearWeights
from midfill.kernels.cpu.weight_formats import WeightFormat, panel_count
from midfill.models.config import ModelConfig
from midfill.runners.cpu.packed_model import PackedModel
from midfill.runners.cpu.runner import CpuRunner, multiplies_bfloat16
from midfill_lab.bench.roofline.ceilings import Resource

ATTENTION, HEAD = "attention", "head"
GROUPS = {
    "qkv": ("qkv", "query", "absorb", "ssm_in"),
    "output": ("expand", "o", "ssm_out"),
    "MLP in": ("gate", "up", "shared_gate", "shared_up"),
    "MLP out": ("down", "shared_down"),
    "router": ("router",),
    "experts in": ("experts_in",),
    "experts out": ("experts_out",),
    "streams": (
        "laurel_left", "laurel_right", "layer_gate", "layer_out", "layer_project", "spread",
        "gather",
    ),
    HEAD: ("head",),
}  # fmt: skip
"""Groups of matrices, by the names under which ``PackedModel.matrices`` has them.

A model has some of them."""
_EXPERTS = ("experts in", "experts out")
LAYER_GROUPS = tuple(name for name in GROUPS if name != HEAD)


@dataclass(frozen=True)
class Matrices:
    """Matrices that a step multiplies its rows by, of all layers together.

    Attributes:
        stored_bytes: of the weights with their scales.
        weights: how many.
        arithmetic: of their products.
        share: of the weights that each row is multiplied by.
    """

    stored_bytes: int
    weights: int
    arithmetic: Resource
    share: float = 1.0


@dataclass(frozen=True)
class ModelSize:
    """What a step's work follows from.

    Attributes:
        groups: the matrices by group, see ``GROUPS``.
        windows: for each layer that keeps KV, how many keys a row sees at most; None for all.
        query_heads, kv_heads, head_dim: of each layer.
        kv_cache_dtype: how K and V are stored.
        vectors_per_cell: 2 for K and V, 1 where they are the same.
    """

    groups: dict[str, Matrices]
    windows: tuple[int | None, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    kv_cache_dtype: KVCacheDtype
    vectors_per_cell: int = 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step of one row reads."""
        return round(sum(each.stored_bytes * each.share for each in self.groups.values()))

    @property
    def layer_slot_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        entry = entry_bytes(self.kv_cache_dtype, self.head_dim)
        return self.vectors_per_cell * self.kv_heads * entry

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return len(self.windows) * self.layer_slot_bytes

    @property
    def attention_arithmetic(self) -> Resource:
        """What products of queries, keys and values are computed in."""
        is_multiplied = self.kv_cache_dtype is KVCacheDtype.BF16 and multiplies_bfloat16()
        return Resource.BFLOAT16 if is_multiplied else Resource.FLOAT32


@dataclass(frozen=True)
class Rows:
    """Rows of one step that belong to streams which are alike.

    Attributes:
        streams: how many.
        context: of each, tokens whose KV was computed before the step.
        rows: of each, tokens that the step computes.
        outputs: of each, rows whose logits are wanted.
    """

    streams: int
    context: int
    rows: int = 1
    outputs: int = 1


@dataclass(frozen=True)
class Savings:
    """What a method leaves of a step's work.

    Attributes:
        keys: share of the context's keys that are kept and read.
        rows: share of rows times layers that are computed.
        pairs: share of the pairs of rows and keys that are computed; of rows that run.
    """

    keys: float = 1.0
    rows: float = 1.0
    pairs: float = 1.0


@dataclass(frozen=True)
class PartWork:
    """What one part of a step requires.

    Attributes:
        name: a group of matrices, or attention.
        bytes: that must be read.
        operations: additions and multiplications.
        arithmetic: in what.
    """

    name: str
    bytes: float
    operations: float
    arithmetic: Resource


NOTHING_SAVED = Savings()


def model_size(runner: CpuRunner) -> ModelSize:
    """Return the sizes of a runner's model."""
    return size_of(runner.config, runner.model, runner.kv_cache_dtype)


def size_of(config: ModelConfig, model: PackedModel, kv_cache_dtype: KVCacheDtype) -> ModelSize:
    """Return the sizes of a packed model whose KV is stored so."""
    groups = {
        group: _matrices([model.matrices[name] for name in names if name in model.matrices])
        for group, names in GROUPS.items()
    }
    if config.experts is not None:
        share = config.experts.per_token / config.experts.count
        groups |= {group: replace(groups[group], share=share) for group in _EXPERTS}
    return ModelSize(
        groups={group: matrices for group, matrices in groups.items() if matrices.weights},
        windows=tuple(config.window_of(layer) for layer in config.attention_layers),
        query_heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        kv_cache_dtype=kv_cache_dtype,
        vectors_per_cell=config.vectors_per_cell,
    )


def _matrices(weights: Sequence[LinearWeights]) -> Matrices:
    is_exact = any(WeightFormat.F32 in matrix.formats for matrix in weights)
    return Matrices(
        stored_bytes=sum(matrix.stored_bytes for matrix in weights),
        weights=sum(_count(matrix) for matrix in weights),
        arithmetic=Resource.FLOAT32 if is_exact else Resource.INT8,
    )


def _count(matrix: LinearWeights) -> int:
    """Return the weights of all layers, without what panels are padded with."""
    layers = len(matrix.panels) // panel_count(matrix.outputs)
    return layers * matrix.outputs * matrix.inputs


def step_work(
    model: ModelSize, rows: Sequence[Rows], savings: Savings = NOTHING_SAVED
) -> list[PartWork]:
    """Return what a step requires of each group of matrices and of attention.

    Args:
        model: the model.
        rows: what the step computes; none takes nothing.
        savings: what a method leaves of it.
    """
    total = sum(each.streams * each.rows for each in rows)
    outputs = sum(each.streams * each.outputs for each in rows)
    parts = [
        _product(name, model.groups[name], total * savings.rows)
        for name in LAYER_GROUPS
        if name in model.groups
    ]
    parts.append(_attention(model, rows, savings))
    parts.append(_product(HEAD, model.groups[HEAD], outputs))
    return parts


def _product(name: str, matrices: Matrices, rows: float) -> PartWork:
    """Return what matrix products require: weights read once, two operations per weight and row."""
    read = matrices.stored_bytes * (1 - (1 - matrices.share) ** rows)
    operations = 2.0 * rows * matrices.weights * matrices.share
    return PartWork(name, read, operations, matrices.arithmetic)


def _attention(model: ModelSize, rows: Sequence[Rows], savings: Savings) -> PartWork:
    """Return what attention requires: K and V read once, four operations per number and pair."""
    read = pairs = 0
    for window in model.windows:
        read += sum(each.streams * keys_read(each, window) for each in rows)
        pairs += sum(each.streams * pairs_of(each, window) for each in rows)
    return PartWork(
        ATTENTION,
        savings.keys * read * model.layer_slot_bytes,
        4.0 * savings.keys * savings.pairs * pairs * model.query_heads * model.head_dim,
        model.attention_arithmetic,
    )


def keys_read(rows: Rows, window: int | None) -> int:
    """Return how many keys of a stream its rows see in a layer, together."""
    if rows.rows == 0:
        return 0
    end = rows.context + rows.rows
    return end if window is None else min(end, window + rows.rows - 1)


def pairs_of(rows: Rows, window: int | None) -> int:
    """Return how many keys a stream's rows see in a layer, counted for each row."""
    first, end = rows.context + 1, rows.context + rows.rows  # keys of the first and the last row
    if window is None or end <= window:
        return (first + end) * rows.rows // 2
    growing = max(window - first, 0)  # rows that see fewer keys than the window holds
    return (first + first + growing - 1) * growing // 2 + (rows.rows - growing) * window
