"""CpuRunner: the model on the CPU, through the compiled kernels."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.core.registry import cpu_target

from midfill.config import KVCacheDtypeName, WeightsOption
from midfill.errors import OptionError
from midfill.kernels.cpu.amx_products import AMX_ROWS
from midfill.kernels.cpu.attention_metadata import (
    TILE_FIELDS,
    AttentionMetadata,
    plan_attention,
)
from midfill.kernels.cpu.attention_parts import no_parts
from midfill.kernels.cpu.bfloat16 import has_pair_products
from midfill.kernels.cpu.calls import EntryCall, compile_side_by_side, kernel_address
from midfill.kernels.cpu.clock import CLOCK_WIDTH, PHASES
from midfill.kernels.cpu.decoder import forward
from midfill.kernels.cpu.decoder_data import Batch, Stages
from midfill.kernels.cpu.jit import compiled_folder, compiled_for
from midfill.kernels.cpu.kv_cache import KVCache, KVCacheDtype, allocate_kv, entry_bytes
from midfill.kernels.cpu.linear import LinearOutput, Tiling, gated_linear, linear
from midfill.kernels.cpu.memory import Float32Array, Int32Array, Int64Array, aligned_zeros
from midfill.kernels.cpu.ragged_cells import pack_ragged
from midfill.kernels.cpu.sinks import SinkWeights
from midfill.kernels.cpu.thread_pool import ThreadContext, ThreadPool
from midfill.kernels.cpu.weight_formats import WeightFormat
from midfill.models.config import ModelConfig
from midfill.runners.cpu.amx import AmxUse, choose_amx
from midfill.runners.cpu.autotune import (
    AMX_MEASURED_ROWS,
    MEASURED_ROWS,
    TileTable,
    autotune_tile_rows,
    default_tile_rows,
)
from midfill.runners.cpu.cells import CpuCells
from midfill.runners.cpu.core_sharing import CoreSharing
from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.cpu.packed_model import PackedModel, load_packed
from midfill.runners.cpu.packed_state_space import CpuStates
from midfill.runners.cpu.step_memory import StepMemory, StepSize, padded_vocab, usual_size
from midfill.runners.cpu.weight_packing import block_format
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import LogitsOps
from midfill.runners.rope import layer_frequencies
from midfill.system.machine import available_threads
from midfill.system.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from midfill.models.checkpoints.checkpoint import Checkpoint  # see packed_model.py
    from midfill.runners.cpu.parts import PartAttention


DEFAULT_STATES = 16


def slot_bytes(config: ModelConfig, kv_cache_dtype: KVCacheDtype) -> int:
    """Return the bytes of one token's K and V in all layers that keep any."""
    entry = entry_bytes(kv_cache_dtype, config.head_dim)
    return len(config.kv_layers) * config.kv_heads * config.vectors_per_cell * entry


def choose_kv_cache_dtype(
    checkpoint: "Checkpoint", weights: WeightsOption, name: KVCacheDtypeName
) -> KVCacheDtype:
    """Return the dtype that ``name`` means for a checkpoint with such weights.

    "auto" is float32 beside float32 weights. Where weights are quantised it is bfloat16 on chips
    that multiply that, and float16 on others.

    Raises:
        OptionError: the model's KV can't be kept so.
    """
    if checkpoint.config.latent is not None and name in ("i8", "i4"):
        raise OptionError(
            f"--kv-cache-dtype {name} is not possible with latent attention, whose keys are values,"
            " too; give f16, bf16 or f32"
        )
    if checkpoint.config.state_space is not None and name in ("i8", "i4"):
        raise OptionError(
            f"--kv-cache-dtype {name} is not possible with models whose layers have a state instead"
            " of KV; give f16, bf16 or f32"
        )
    if checkpoint.config.altup is not None and name in ("i8", "i4"):
        raise OptionError(
            f"--kv-cache-dtype {name} is not possible with models whose hidden rows have several"
            " streams; give f16, bf16 or f32"
        )
    if name == "auto" and block_format(checkpoint, weights) is WeightFormat.F32:
        return KVCacheDtype.F32
    return usual_kv_cache_dtype(name)


def usual_kv_cache_dtype(name: KVCacheDtypeName) -> KVCacheDtype:
    """Return the dtype that ``name`` means beside quantised weights."""
    if name != "auto":
        return KVCacheDtype(name)
    return KVCacheDtype.BF16 if multiplies_bfloat16() else KVCacheDtype.F16


def multiplies_bfloat16() -> bool:
    """Return whether this chip has instructions for products of bfloat16."""
    return has_pair_products(cpu_target.target_context)


class CpuRunner:
    """Implements ``runners.forward.runner.Runner``.

    A row's logits are the same bit for bit whatever else is in the batch, and on any number of
    threads.

    ``forward`` runs a whole step in one compiled call. ``embed``, ``run_layers`` and
    ``compute_logits`` run it in parts, over hidden rows that the caller owns.

    Attributes:
        config: of the model.
        model: the packed weights.
        kv_cache_dtype: how K and V are stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: PackedModel,
        kv_cache_dtype: KVCacheDtype,
        *,
        slots: int,
        states: int = DEFAULT_STATES,
        threads: int | None = None,
        max_rows: int = 0,
        progress: Progress | None = None,
        compiles: Sequence[EntryCall] = (),
    ) -> None:
        """Allocate the KV cache and compile the kernels.

        Args:
            config: the model's.
            model: its weights.
            kv_cache_dtype: how K and V are stored.
            slots: how many tokens' KV to make room for.
            states: how many states, if the model has any.
            threads: that a step runs on; None is one per available core.
            max_rows: of most steps: memory for so many is allocated now, for more when needed.
            progress: called with (stage, done, total).
            compiles: further kernels, compiled at the same time.

        Raises:
            MidfillError: see ``choose_amx``.
        """
        self.config, self.model, self.kv_cache_dtype = config, model, kv_cache_dtype
        amx = choose_amx()
        self._pool = ThreadPool(threads or available_threads())
        self._sharing = CoreSharing(self._pool)
        entries = len(self.config.kv_layers) * self.config.kv_heads * slots
        if self.config.vectors_per_cell == 1:
            keys, scales = allocate_kv(self.kv_cache_dtype, entries, self.config.head_dim)
            self._kv_cache = KVCache(keys, keys, scales, scales)
        else:
            self._kv_cache = KVCache.allocate(self.kv_cache_dtype, entries, self.config.head_dim)
        self.logits_ops: LogitsOps = NUMPY_LOGITS
        space = self.config.state_space
        self._states = None if space is None else CpuStates(space, states)
        self._slots = slots
        frequencies = layer_frequencies(self.config)
        self._cells = CpuCells(self._kv_cache, self.config.head_dim, frequencies, self._pool)
        self._clock = np.zeros((self._pool.threads, CLOCK_WIDTH), np.int64)
        self._tile_rows = default_tile_rows(self.model)
        self._config = model.config  # and the addresses of kernels, once they are compiled
        self._no_parts = no_parts(self._kv_cache.keys)
        self._parts: PartAttention | None = None
        usual = usual_size(self.config, max_rows, slots, self._pool.threads)
        self._memory = StepMemory(
            self.model, self.config, self._clock, self._tile_rows, self._pool.threads, usual
        )
        # Views of the workspace's logits, by their number of rows: making one takes as long as a
        # phase of a small model.
        self._views: dict[int, Float32Array] = {}
        progress = progress or ignore_progress
        progress("compiling kernels, once for this chip", 0, 1)
        self._forward = self._compile(compiles)
        if slots < AMX_MEASURED_ROWS and amx is AmxUse.AUTO:
            amx = AmxUse.OFF
        if slots >= MEASURED_ROWS or amx is AmxUse.ON:
            progress("measuring kernels", 0, 1)
            self._tile_rows[:] = autotune_tile_rows(
                self.model, self.threads, self.time_tiles, amx, self._sharing.waited
            )

    @classmethod
    def load(
        cls,
        checkpoint: "Checkpoint",
        *,
        slots: int,
        states: int = DEFAULT_STATES,
        threads: int | None = None,
        max_rows: int = 0,
        weights: WeightsOption = "auto",
        kv_cache_dtype: KVCacheDtypeName = "auto",
        progress: Progress | None = None,
    ) -> "CpuRunner":
        """Return the runner of a checkpoint.

        Args:
            checkpoint: the model.
            weights: see ``load_packed``.
            kv_cache_dtype: see ``choose_kv_cache_dtype``.
            slots, states, threads, max_rows, progress: see ``__init__``.

        Raises:
            CheckpointError: see ``load_packed``.
            MidfillError: see ``choose_amx``.
        """
        return cls(
            checkpoint.config,
            load_packed(checkpoint, weights, progress),
            choose_kv_cache_dtype(checkpoint, weights, kv_cache_dtype),
            slots=slots,
            states=states,
            threads=threads,
            max_rows=max_rows,
            progress=progress,
        )

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def kv_bytes(self) -> int:
        states = 0 if self._states is None else self._states.nbytes
        return states + sum({id(array): array.nbytes for array in self._kv_cache}.values())

    @property
    def states(self) -> CpuStates | None:
        """See ``Runner.states``."""
        return self._states

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def cells(self) -> CpuCells:
        """The KV cache, cell by cell."""
        return self._cells

    @property
    def description(self) -> str:
        amx = ", AMX" if self._tile_rows.max() >= AMX_ROWS else ""
        on_disk = ", experts on disk" if self.model.experts_on_disk else ""
        plural = "" if self.threads == 1 else "s"
        return f"CPU kernels, {self.threads} thread{plural}{amx}{on_disk}"

    @property
    def build(self) -> str:
        used: list[Any] = [self._pass(), *(function for function, _ in self._mixtures())]
        packages = [Path(inspect.getfile(function.py_func)).parent for function in used]
        return " ".join(["cpu", *sorted({compiled_folder(package).name for package in packages})])

    @property
    def threads(self) -> int:
        """Threads that a step runs on."""
        return self._pool.threads

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """See ``Runner.forward``."""
        layers = self.config.layers
        if not batch.needs_only_outputs(self.config):
            self._run(batch, None, Stages(True, 0, layers, True))
            return self._logits(len(batch.logit_rows))
        last = layers - self.config.kv_sharing_layers
        self._run(batch, None, Stages(True, 0, last, False))
        if len(batch.logit_rows):
            hidden = self._memory.hidden[batch.logit_rows]
            self._run(batch.only_outputs(), hidden, Stages(False, last, layers, True))
        return self._logits(len(batch.logit_rows))

    def argmax_tokens(self, logits: Float32Array) -> list[int]:
        """See ``Runner.argmax_tokens``: the kernels have found them."""
        tokens: list[int] = self._memory.workspace.argmax[: len(logits)].tolist()
        return tokens

    def embed(self, batch: ForwardBatch) -> Float32Array:
        """Return the tokens' embeddings: new hidden rows, float32 [rows, row_width]."""
        hidden = aligned_zeros((batch.rows, self.config.row_width), np.float32)
        self._run(batch, hidden, Stages(True, 0, 0, False))
        return hidden

    def join(self, parts: Sequence[Float32Array]) -> Float32Array:
        """See ``Runner.join``."""
        return np.concatenate(parts)

    def run_layers(
        self, batch: ForwardBatch, hidden: Float32Array, first: int, end: int
    ) -> Float32Array:
        """Run layers first <= i < end, which write K and V of the batch's rows.

        Args:
            batch: the step.
            hidden: float32 [rows, row_width], contiguous; updated in place.
            first, end: the layers.

        Returns:
            ``hidden``.

        Raises:
            ValueError: ``hidden`` doesn't fit the batch.
        """
        self._run(batch, self._checked(batch, hidden), Stages(False, first, end, False))
        return hidden

    def compute_logits(self, batch: ForwardBatch, hidden: Float32Array) -> Float32Array:
        """Return the logits [outputs, vocab] float32 of the rows that want them.

        Args:
            batch: the step.
            hidden: float32 [rows, row_width], as the last layer left it.

        Raises:
            ValueError: ``hidden`` doesn't fit the batch.
        """
        self._run(batch, self._checked(batch, hidden), Stages(False, 0, 0, True))
        return self._logits(len(batch.logit_rows))

    def observed_queries(
        self, batch: ForwardBatch, first: int = 0, end: int | None = None
    ) -> Float32Array:
        """See ``Runner.observed_queries``."""
        config, rows = self.config, len(batch.observed_rows)
        shape = (config.layers, rows, config.query_heads, config.head_dim)
        every = self._memory.workspace.observed[: math.prod(shape)].reshape(shape)
        return every[first:end].copy()

    def phase_ticks(self) -> Int64Array:
        """Return each thread's ticks in each phase of all steps so far: [threads, phases]."""
        return self._clock[:, : len(PHASES)].copy()

    @property
    def tile_rows(self) -> TileTable:
        """How products are tiled, and weights prefetched; a copy."""
        return self._tile_rows.copy()

    def time_tiles(self, tile_rows: TileTable, rows: int) -> Int64Array:
        """Tile products so from now on, and time a step.

        It runs some rows through the last two layers and the head, but one row through all layers,
        so that weights come from memory. The first slots, and the first state, are overwritten.
        Nobody reads them: a slot is written before it is read, and a state cleared.

        Args:
            tile_rows: the table.
            rows: of the step.

        Returns:
            the ticks of each phase, all threads together.
        """
        self._tile_rows[:] = tile_rows
        numbers = np.arange(rows, dtype=np.int32)
        ends = np.array([0, rows], np.int32)
        batch = ForwardBatch(
            np.zeros_like(numbers), np.zeros_like(numbers), numbers, ends, ends, numbers, numbers,
            states=np.zeros(0 if self._states is None else 1, np.int32),
        )  # fmt: skip
        hidden = aligned_zeros((rows, self.config.row_width), np.float32)
        layers = self.config.layers
        before = self.phase_ticks()
        first = 0 if rows == 1 else max(0, layers - 2)
        with self._sharing.all_threads():
            self._run(batch, hidden, Stages(False, first, layers, True))
        ticks: Int64Array = (self.phase_ticks() - before).sum(axis=0)
        return ticks

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _run(self, batch: ForwardBatch, hidden: Float32Array | None, stages: Stages) -> None:
        """Run a part of the forward pass over hidden rows; None is those of the step's memory."""
        prepared = self._prepare(batch)
        self._reserve(batch, prepared.attention.partials)
        if hidden is None:
            hidden = self._memory.hidden[: batch.rows]
        if (
            batch.attention
            and stages.end_layer > stages.first_layer
            and not all(plan.is_dense for _, plan in batch.plans())
        ):
            execute = partial(self._execute, hidden, batch.states)
            self._part_attention().run(batch, prepared, stages, self._memory.workspace, execute)
            return
        self._execute(hidden, batch.states, prepared, stages)

    def _part_attention(self) -> "PartAttention":
        if self._parts is None:
            from midfill.runners.cpu.parts import PartAttention

            stride = self.model.weights.qkv.outputs
            sinks = self.model.sinks
            self._parts = PartAttention(self.config, self._pool, self._kv_cache, stride, sinks)
        return self._parts

    def _execute(
        self, hidden: Float32Array, states: Int32Array, prepared: Batch, stages: Stages
    ) -> None:
        self._sharing.run(
            self._forward, self._config, *self._arguments(hidden, states, prepared, stages)
        )

    def _arguments(
        self, hidden: Float32Array, states: Int32Array, prepared: Batch, stages: Stages
    ) -> tuple[object, ...]:
        """Return what the forward pass takes after its configuration."""
        model, memory = self.model, self._memory
        rows = hidden.reshape(-1)
        if model.states is not None and memory.states is not None and self._states is not None:
            from midfill.kernels.cpu.state_space.data import StateDecoderWeights, StateWorkspace

            return (
                StateDecoderWeights(model.weights, model.states), self._kv_cache, prepared, rows,
                StateWorkspace(memory.workspace, memory.states, self._states.values, states),
                stages,
            )  # fmt: skip
        if model.altup is not None and memory.altup is not None:
            from midfill.kernels.cpu.altup.data import AltUpDecoderWeights, AltUpWorkspace

            streams = AltUpDecoderWeights(model.weights, model.altup)
            held = AltUpWorkspace(memory.workspace, memory.altup)
            return (streams, self._kv_cache, prepared, rows, held, stages)
        if model.sinks is not None:
            own = SinkWeights(*model.weights, model.sinks)
            return (own, self._kv_cache, prepared, rows, memory.workspace, stages)
        if model.latent is None or memory.latent is None:
            return (model.weights, self._kv_cache, prepared, rows, memory.workspace, stages)
        from midfill.kernels.cpu.latent.data import LatentDecoderWeights, LatentWorkspace

        weights = LatentDecoderWeights(model.weights, model.latent)
        space = LatentWorkspace(memory.workspace, memory.latent)
        return (weights, self._kv_cache, prepared, rows, space, stages)

    def _checked(self, batch: ForwardBatch, hidden: Float32Array) -> Float32Array:
        """Return hidden rows that a caller passed."""
        shape = (batch.rows, self.config.row_width)
        if hidden.shape != shape or hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
            raise ValueError(f"hidden rows must be float32, contiguous and of shape {shape}")
        return hidden

    def _logits(self, outputs: int) -> Float32Array:
        """Return a view of the logits [outputs, vocab] that the last call left."""
        view = self._views.get(outputs)
        if view is None:
            padded = padded_vocab(self.config)
            logits = self._memory.workspace.logits[: outputs * padded].reshape(outputs, padded)
            view = self._views[outputs] = logits[:, : self.config.vocab]
        return view

    def _prepare(self, batch: ForwardBatch) -> Batch:
        """Return the batch as the kernels take it, its attention planned."""
        group = self.config.query_heads // self.config.kv_heads
        tiles = np.zeros((batch.rows + 1, TILE_FIELDS), np.int32)
        batch.check_plans(self.config)
        batch.check_states(self.config)
        positions = batch.positions
        if not self.config.has_rope:  # all rows have the angles of position 0, which don't turn
            positions = np.zeros_like(positions)
        ragged, most_cells = pack_ragged(
            [None if plan is None else plan.cells for plan in batch.attention]
        )
        tile_count, partials = plan_attention(
            batch.query_indptr, batch.kv_indptr, batch.visible_slots, most_cells, group,
            self.config.kv_heads, self.threads, tiles,
        )  # fmt: skip
        attention = AttentionMetadata(
            batch.query_indptr, batch.kv_indptr, batch.kv_slots, batch.visible_slots, tiles,
            tile_count, partials, ragged,
        )  # fmt: skip
        return Batch(
            batch.token_ids, positions, batch.write_slots, batch.logit_rows,
            batch.observed_rows, attention, self._no_parts,
        )  # fmt: skip

    def _reserve(self, batch: ForwardBatch, partials: int) -> None:
        """Make room in the workspace for a step of this size."""
        size = StepSize(batch.rows, len(batch.logit_rows), partials, len(batch.observed_rows))
        if self._memory.reserve(size):
            self._views = {}

    def _compile(self, further: Sequence[EntryCall]) -> Callable[..., None]:
        """Return the forward pass, compiled, after an empty step on this thread and one on all.

        The second one compiles what starts the threads, for which the first request would wait.
        Products, and ``further`` kernels, are compiled beside the rest of the pass, in about the
        same time.
        """
        nothing = np.zeros(0, np.int32)
        batch = ForwardBatch(
            nothing, nothing, nothing, np.zeros(1, np.int32), np.zeros(1, np.int32), nothing,
            nothing,
        )  # fmt: skip
        arguments = self._arguments(
            self._memory.hidden, nothing, self._prepare(batch), Stages(True, 0, 0, True)
        )
        function = self._pass()
        products = [*self._products(), *self._mixtures()]
        whole = (0, 1, self._pool.sync, self._config, *arguments)
        compile_side_by_side([*products, *further], [(function, whole)])
        compiled = compiled_for(function, *whole)
        addresses = [kernel_address(function, *taken) for function, taken in products]
        linear_at, gated_at, mix_at, expert_at = [*addresses, 0, 0][:4]
        self._config = self._config._replace(
            linear=linear_at, gated_linear=gated_at, mix_experts=mix_at
        )
        if expert_at:
            self._memory.use_expert_linear(expert_at)
        compiled(0, 1, self._pool.sync, self._config, *arguments)
        self._pool.run_on_standby(compiled, self._config, *arguments)
        return compiled

    def _pass(self) -> Callable[..., None]:
        """Return the forward pass that the model needs, of which few users need any but the first.

        Each of the others is in a package of its own, so that it is compiled where it is needed.
        """
        if self.model.latent is not None:
            from midfill.kernels.cpu.latent.decoder import forward_latent

            return forward_latent
        if self.model.altup is not None:
            from midfill.kernels.cpu.altup.decoder import forward_streams

            return forward_streams
        if self.model.states is not None:
            from midfill.kernels.cpu.state_space.decoder import forward_states

            return forward_states
        return forward

    def _products(self) -> list[EntryCall]:
        """Return the kernels that multiply by weights, ``linear`` first, with their arguments."""
        weights, workspace = self.model.weights, self._memory.workspace
        context = ThreadContext(0, 1, self._pool.sync, self._clock)
        tiling = Tiling(workspace.tile_rows[0], workspace.products[0])
        out = LinearOutput(workspace.qkv, 0, 0, False, 1.0, workspace.maxima[0], False)
        normed, gated = workspace.normed, workspace.gated
        return [
            (linear, (context, normed, 0, weights.qkv, 0, out, tiling)),
            (gated_linear, (context, normed, 0, 0, weights.gate_up, 0, gated, tiling)),
        ]

    def _mixtures(self) -> list[EntryCall]:
        """Return the kernel of mixtures of experts, if the model has any.

        A second one is there for products with experts in a format that no other weights have.
        """
        if self.model.experts is None:
            return []
        from midfill.kernels.cpu.experts.mixture import mix_experts

        workspace = self._memory.workspace
        context = ThreadContext(0, 1, self._pool.sync, self._clock)
        tiling = Tiling(workspace.tile_rows[0], workspace.products[0])
        arguments = (
            context, self._config, 0, 0, workspace.normed, 0, workspace.qkv, workspace.gated,
            tiling, tiling, workspace.experts,
        )  # fmt: skip
        if self.model.experts.down.formats != {WeightFormat.MXFP4}:
            return [(mix_experts, arguments)]
        from midfill.kernels.cpu.experts.mxfp4 import multiply_mxfp4

        values = workspace.qkv
        out = LinearOutput(values, 0, 0, False, 1.0, values, False)
        multiplied = (context, workspace.normed, 0, self.model.weights.o, 0, out, tiling)
        return [(mix_experts, arguments), (multiply_mxfp4, multiplied)]
