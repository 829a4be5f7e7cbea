"""StepMemory: what the CPU kernels write in a step, kept for the next one."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midfill.kernels.cpu.activations import ACTIVATION_BLOCK_BYTES, Activations
from midfill.kernels.cpu.altup.data import AltUpMemory
from midfill.kernels.cpu.argmax import MAXIMA_WIDTH
from midfill.kernels.cpu.attention import scratch_size
from midfill.kernels.cpu.attention_metadata import partial_rows
from midfill.kernels.cpu.decoder import MAX_SOLO_ROWS
from midfill.kernels.cpu.decoder_data import Workspace
from midfill.kernels.cpu.experts.table import LINEAR_AT, ExpertMemory
from midfill.kernels.cpu.latent.data import LatentMemory
from midfill.kernels.cpu.linear import PRODUCTS_SIZE
from midfill.kernels.cpu.memory import Float32Array, Int64Array, aligned_zeros
from midfill.kernels.cpu.row_blocks import ALONE_SYNC
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kernels.cpu.softmax import SoftmaxSums
from midfill.kernels.cpu.state_space.data import StateMemory
from midfill.kernels.cpu.weight_formats import GROUP, PANEL, WeightFormat, panel_count
from midfill.models.config import ModelConfig
from midfill.runners.cpu.autotune import TileTable
from midfill.runners.cpu.expert_memory import expert_memory, expert_table, gated_width
from midfill.runners.cpu.packed_altup import altup_memory
from midfill.runners.cpu.packed_latent import latent_memory
from midfill.runners.cpu.packed_model import PackedModel
from midfill.runners.cpu.packed_state_space import state_memory

_MAX_RESERVED_LOGITS = 2**28
"""Bytes; 128 rows of a vocabulary of half a million tokens."""

_GROWTH = 1.25


class GrowingArrays:
    """Aligned arrays by name. One is replaced only if it is too small, by one a quarter larger.

    So a load whose steps grow little by little leaves few holes in the process's memory.
    """

    def __init__(self) -> None:
        self._held: dict[str, npt.NDArray[Any]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._held.values())

    def floats(self, name: str, size: int) -> Float32Array:
        """Return a flat float32 array of at least ``size`` elements, whatever they are."""
        return self._get(name, size, np.float32)

    def bytes(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        """Return the same of uint8."""
        return self._get(name, size, np.uint8)

    def _get(self, name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        held = self._held.get(name)
        if held is None or held.size < size:
            grown = 0 if held is None else int(_GROWTH * held.size)
            held = self._held[name] = aligned_zeros(max(size, grown), dtype)
        return held


class StepSize(NamedTuple):
    """What a step needs memory for.

    Attributes:
        rows: tokens that go through the model.
        outputs: rows whose logits are computed.
        partials: see AttentionMetadata.
        observed: rows whose queries are kept.
    """

    rows: int
    outputs: int
    partials: int = 1
    observed: int = 0


def usual_size(config: ModelConfig, max_rows: int, slots: int, threads: int) -> StepSize:
    """Return a size that few steps exceed.

    Those are steps of methods that need all rows of a prompt at once, and those of which many
    requests share a long prefix.

    Args:
        config: the model.
        max_rows: of a step without such methods.
        slots: of the KV cache.
        threads: that a step runs on.
    """
    rows = max(max_rows, MAX_SOLO_ROWS)
    logits_bytes = padded_vocab(config) * np.dtype(np.float32).itemsize
    outputs = max(min(max_rows, _MAX_RESERVED_LOGITS // logits_bytes), 1)
    # More query tiles keep the threads busy without partials (``plan_attention``).
    tiles = 0 if threads == 1 else min((4 * threads - 1) // config.kv_heads, rows)
    # Each tile may end with a segment that isn't full.
    partials = min(tiles * -(-config.context // SEGMENT), slots // SEGMENT + tiles)
    return StepSize(rows, outputs, max(partials, 1))


def padded_vocab(config: ModelConfig) -> int:
    """Return the number of floats from one row of logits to the next."""
    return panel_count(config.vocab) * PANEL


class StepMemory:
    """The workspace and the hidden rows of a step.

    Arrays for the usual steps are allocated once, at the start, and never move. The system gives
    their pages when they are first written, so memory grows with what steps need, up to a size
    that is known. Arrays that grew from step to step would each time leave a hole of the old
    array's size, which nothing else fills.

    Args:
        model: whose steps these are.
        clock, tile_rows: the workspace's.
        threads: that a step runs on.
        usual: the size of the largest step that needs no further memory.

    Attributes:
        workspace: for the kernels; another one after ``reserve`` has returned True.
        latent: the same for latent attention; None for models without.
        states: the same for layers with a state; None for models without.
        altup: the same for streams of hidden rows; None for models without.
        hidden: float32 [rows, row_width] for at least as many rows as were reserved.
    """

    def __init__(
        self,
        model: PackedModel,
        config: ModelConfig,
        clock: Int64Array,
        tile_rows: TileTable,
        threads: int,
        usual: StepSize,
    ) -> None:
        self._model, self._config, self._threads = model, config, threads
        self._clock, self._tile_rows = clock, tile_rows
        self._arrays = GrowingArrays()
        self._size = usual
        self._quantized = any(
            matrix.formats != {WeightFormat.F32} for matrix in model.matrices.values()
        )
        readers = model.weights.down.formats
        if model.experts is not None:
            readers = readers | model.experts.shared_down.formats
        self._values_gated = WeightFormat.F32 in readers
        # The table in the workspace has only addresses.
        self._expert_memory: ExpertMemory | None = None
        self._expert_linear = 0
        self.workspace = self._workspace()
        self.latent = self._latent()
        self.states = self._states()
        self.altup = self._altup()
        self.hidden = self._hidden()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that grow with a step's size, whether written or not."""
        return self._arrays.nbytes

    def reserve(self, size: StepSize) -> bool:
        """Make room for a step of a size; return whether that replaced the workspace."""
        if all(wanted <= held for wanted, held in zip(size, self._size, strict=True)):
            return False
        self._size = StepSize(*map(max, size, self._size))
        self.workspace = self._workspace()
        self.latent = self._latent()
        self.states = self._states()
        self.altup = self._altup()
        self.hidden = self._hidden()
        return True

    def use_expert_linear(self, address: int) -> None:
        """Have products with experts computed by the kernel at an address."""
        self._expert_linear = address
        self.workspace.experts[LINEAR_AT] = address

    def _hidden(self) -> Float32Array:
        rows, width = self._size.rows, self._config.row_width
        return self._arrays.floats("hidden", rows * width)[: rows * width].reshape(rows, width)

    def _workspace(self) -> Workspace:
        config, threads, size = self._config, self._threads, self._size
        rows, outputs = size.rows, size.outputs
        attended = config.query_heads * config.head_dim
        group = config.query_heads // config.kv_heads
        merged = partial_rows(size.partials, group, config.kv_heads)
        floats = self._arrays.floats
        projected = rows * config.hidden if config.post_norms else 0
        normed = max(rows, outputs, threads * MAX_SOLO_ROWS) * config.hidden
        return Workspace(
            normed=self._activations("normed", normed),
            qkv=floats("qkv", rows * self._model.weights.qkv.outputs),
            attended=self._activations("attended", rows * attended),
            gated=self._activations("gated", rows * gated_width(config), self._values_gated),
            projected=floats("projected", projected),
            logits=floats("logits", outputs * padded_vocab(config)),
            maxima=self._per_thread("maxima", outputs * MAXIMA_WIDTH),
            argmax=aligned_zeros(outputs, np.int32),
            products=self._per_thread("products", PRODUCTS_SIZE),
            attention=self._per_thread("attention", scratch_size(group, config.head_dim)),
            cells=aligned_zeros((threads, 2 * SEGMENT), np.int32),
            observed=floats("observed", config.layers * size.observed * attended),
            partials=SoftmaxSums(
                floats("states", merged * 2), floats("sums", merged * config.head_dim)
            ),
            clock=self._clock,
            tile_rows=self._tile_rows,
            alone=aligned_zeros((threads, ALONE_SYNC), np.int64),
            experts=self._expert_table(rows),
        )

    def _latent(self) -> LatentMemory | None:
        weights = self._model.latent
        if weights is None:
            return None
        return latent_memory(
            self._config, weights, self._size.rows, self._threads, self._arrays.floats,
            self._activations,
        )  # fmt: skip

    def _states(self) -> StateMemory | None:
        weights = self._model.states
        if weights is None:
            return None
        queries = self._config.query_heads * self._config.head_dim
        return state_memory(
            weights, self._size.rows, queries, self._arrays.floats, self._activations
        )

    def _altup(self) -> AltUpMemory | None:
        weights = self._model.altup
        if weights is None:
            return None
        return altup_memory(
            self._config, weights, self._size.rows, self._arrays.floats, self._activations
        )

    def _expert_table(self, rows: int) -> Int64Array:
        experts, weights = self._config.experts, self._model.experts
        if experts is None or weights is None:
            return np.zeros(0, np.int64)
        self._expert_memory = expert_memory(
            self._config, experts, weights, rows, self._threads, self._arrays.floats,
            self._arrays.bytes,
        )  # fmt: skip
        activation = self._model.weights.gate_up.activation
        return expert_table(
            self._config, weights, self._expert_memory, activation, self._expert_linear,
            on_disk=self._model.experts_on_disk,
        )  # fmt: skip

    def _activations(self, name: str, size: int, with_values: bool = True) -> Activations:
        blocks = size // GROUP * ACTIVATION_BLOCK_BYTES if self._quantized else 0
        return Activations(
            self._arrays.floats(name, size if with_values else 0),
            self._arrays.bytes(f"{name} blocks", blocks),
        )

    def _per_thread(self, name: str, size: int) -> Float32Array:
        threads = self._threads
        flat = self._arrays.floats(name, threads * size)
        return flat[: threads * size].reshape(threads, size)
