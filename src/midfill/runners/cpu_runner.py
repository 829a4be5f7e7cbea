"""CpuRunner: the model on the CPU, through the compiled kernels."""

import numpy as np
import numpy.typing as npt
import torch

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.config import KvDtype, WeightsOption
from midfill.forward.batch import ForwardBatch
from midfill.kernels.cpu.attention import ITEM_FIELDS, TILE_ROWS, plan_attention, scratch_size
from midfill.kernels.cpu.cells import CellFormat, allocate_cells, cell_bytes
from midfill.kernels.cpu.clock import CLOCK_CELLS, PHASES
from midfill.kernels.cpu.decoder import SOLO_ROWS, Batch, Cells, Workspace, forward
from midfill.kernels.cpu.dots import ROUNDED_BYTES
from midfill.kernels.cpu.linear import MAX_TILE_ROWS
from midfill.kernels.cpu.memory import aligned_zeros
from midfill.kernels.cpu.packing import GROUP, PANEL, WeightFormat, panel_count
from midfill.kernels.cpu.team import Team
from midfill.models.config import ModelConfig
from midfill.runners.packed_model import PackedModel, block_format, load_packed
from midfill.runners.tile_choice import MEASURED_ROWS, Plan, choose_tiles, even_plan
from midfill.system.cores import available_threads
from midfill.system.progress import Progress


def slot_bytes(config: ModelConfig, cell_format: CellFormat) -> int:
    """Bytes of one token's K and V in all layers."""
    return config.layers * config.kv_heads * 2 * cell_bytes(cell_format, config.head_dim)


def choose_cell_format(checkpoint: Checkpoint, weights: WeightsOption, kv: KvDtype) -> CellFormat:
    """The KV precision that ``kv`` means for a checkpoint whose weights are kept as ``weights``.

    "auto" is float32 beside float32 weights, and float16 where weights are rounded anyway.
    """
    if kv != "auto":
        return CellFormat(kv)
    exact = block_format(checkpoint, weights) is WeightFormat.F32
    return CellFormat.F32 if exact else CellFormat.F16


class CpuRunner:
    """Implements ``forward.runner.Runner``.

    Logits of a row are the same bit for bit whatever else is in the batch and however many
    threads work on it.

    Attributes:
        config: the model's.
        model: its weights.
        cell_format: how KV is kept.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        slots: int,
        threads: int | None = None,
        weights: WeightsOption = "auto",
        kv_dtype: KvDtype = "auto",
        progress: Progress | None = None,
    ) -> None:
        """Load the weights, take the memory for ``slots`` slots and compile the kernels.

        Args:
            kv_dtype: see ``choose_cell_format``.

        Raises:
            CheckpointError: see ``load_packed``.
        """
        self.config = checkpoint.config
        self.model: PackedModel = load_packed(checkpoint, weights, progress)
        self._team = Team(threads or available_threads())
        self.cell_format = choose_cell_format(checkpoint, weights, kv_dtype)
        cells = self.config.layers * self.config.kv_heads * slots
        keys, key_scales = allocate_cells(self.cell_format, cells, self.config.head_dim)
        values, value_scales = allocate_cells(self.cell_format, cells, self.config.head_dim)
        self._cells = Cells(keys, values, key_scales, value_scales)
        self._slots = slots
        self._clock = np.zeros((self._team.threads, CLOCK_CELLS), np.int64)
        self._heights = even_plan(self.model)
        self._rows = 0
        self._outputs = 0
        self._partials = 0
        self._work = self._workspace(rows=SOLO_ROWS, outputs=1, partials=1)
        if progress is not None:
            progress("compiling kernels", 0, 1)
        self._compile()
        if progress is not None:
            progress("compiling kernels", 1, 1)
        if slots >= MEASURED_ROWS:
            self._heights[:] = choose_tiles(self.model, self.threads, self._time_tiles)

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def kv_bytes(self) -> int:
        return sum(array.nbytes for array in self._cells)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def threads(self) -> int:
        """Threads that a step runs on."""
        return self._team.threads

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See ``Runner.forward``."""
        return torch.from_numpy(self.run_layers(batch, 0, self.config.layers))

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> npt.NDArray[np.float32]:
        """Run layers first <= i < end; see ``kernels.cpu.decoder.forward``.

        Returns logits [outputs, vocab], which mean something only after the last layer. The
        hidden rows stay in place for the next call.
        """
        packed = self._plan(batch)
        outputs = len(batch.logit_rows)
        self._reserve(batch.rows, outputs, packed.partials)
        model = self.model
        self._team.run(
            forward, model.shape, model.formats, model.weights, self._cells, packed, self._work,
            first, end,
        )  # fmt: skip
        padded = panel_count(self.config.vocab) * PANEL
        logits = self._work.logits[: outputs * padded].reshape(outputs, padded)
        return logits[:, : self.config.vocab]

    def hidden(self, rows: int) -> npt.NDArray[np.float32]:
        """The hidden rows [rows, hidden] as the last call left them; a view."""
        return self._work.hidden[: rows * self.config.hidden].reshape(rows, self.config.hidden)

    def phase_ticks(self) -> npt.NDArray[np.int64]:
        """Ticks of every thread in every phase of all steps until now: int64 [threads, phases]."""
        return self._clock[:, : len(PHASES)].copy()

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def _plan(self, batch: ForwardBatch) -> Batch:
        group = self.config.query_heads // self.config.kv_heads
        items = np.zeros((batch.rows + 1, ITEM_FIELDS), np.int32)
        tiles, partials = plan_attention(
            batch.query_indptr, batch.kv_indptr, group, self.config.kv_heads, self._team.threads,
            items,
        )  # fmt: skip
        return Batch(
            batch.token_ids, batch.positions, batch.write_slots, batch.query_indptr,
            batch.kv_indptr, batch.kv_slots, batch.logit_rows, items, tiles, partials,
        )  # fmt: skip

    def _reserve(self, rows: int, outputs: int, partials: int) -> None:
        """Grow the workspace to hold a step of this size."""
        if rows <= self._rows and outputs <= self._outputs and partials <= self._partials:
            return
        hidden = self.hidden(self._rows).copy()
        self._work = self._workspace(
            max(rows, self._rows), max(outputs, self._outputs), max(partials, self._partials)
        )
        self._work.hidden[: hidden.size] = hidden.reshape(-1)

    def _workspace(self, rows: int, outputs: int, partials: int) -> Workspace:
        config, threads = self.config, self._team.threads
        self._rows, self._outputs, self._partials = rows, outputs, partials
        attended = config.query_heads * config.head_dim
        group = config.query_heads // config.kv_heads
        entries = partials * config.kv_heads * max(TILE_ROWS, group)
        normed = max(rows, outputs, threads * SOLO_ROWS) * config.hidden

        def floats(*shape: int) -> npt.NDArray[np.float32]:
            return aligned_zeros(shape, np.float32)

        coded = any(each != WeightFormat.F32 for each in self.model.formats)

        def codes(size: int) -> npt.NDArray[np.uint8]:
            return aligned_zeros(size // GROUP * ROUNDED_BYTES if coded else 0, np.uint8)

        return Workspace(
            hidden=floats(rows * config.hidden),
            normed=floats(normed),
            qkv=floats(rows * (attended + 2 * config.kv_heads * config.head_dim)),
            attended=floats(rows * attended),
            gated=floats(rows * config.ffn),
            logits=floats(outputs * panel_count(config.vocab) * PANEL),
            normed_codes=codes(normed),
            attended_codes=codes(rows * attended),
            gated_codes=codes(rows * config.ffn),
            tiles=floats(threads, 2 * MAX_TILE_ROWS * PANEL),
            attention=floats(threads, scratch_size(group, config.head_dim)),
            partial_state=floats(entries * 2),
            partial_sums=floats(entries * config.head_dim),
            clock=self._clock,
            heights=self._heights,
        )

    def _time_tiles(self, plan: Plan) -> npt.NDArray[np.int64]:
        """Ticks of every phase of the last two layers and the head over some rows.

        What it writes into the first slots nobody reads: a slot is written before it is read.
        """
        self._heights[:] = plan
        numbers = np.arange(MEASURED_ROWS, dtype=np.int32)
        ends = np.array([0, MEASURED_ROWS], np.int32)
        batch = ForwardBatch(
            np.zeros_like(numbers), np.zeros_like(numbers), numbers, ends, ends, numbers, numbers
        )
        before = self.phase_ticks()
        self.run_layers(batch, max(0, self.config.layers - 2), self.config.layers)
        ticks: npt.NDArray[np.int64] = (self.phase_ticks() - before).sum(axis=0)
        return ticks

    def _compile(self) -> None:
        """Run an empty step on this thread, so that the team never compiles."""
        nothing = np.zeros(0, np.int32)
        batch = ForwardBatch(
            nothing, nothing, nothing, np.zeros(1, np.int32), np.zeros(1, np.int32), nothing,
            nothing,
        )  # fmt: skip
        model = self.model
        forward(
            0, 1, self._team.sync, model.shape, model.formats, model.weights, self._cells,
            self._plan(batch), self._work, 0, 0,
        )  # fmt: skip
