"""StepGraphs: steps of few rows as CUDA graphs, which one launch runs.

A step of a small model launches some hundred kernels, and launching them takes longer than running
them. So all of it is captured once for each of some numbers of rows, and a batch is padded to the
next of them. Larger batches run the same kernels without a graph.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional

from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder
from midfill.runners.torch.fused_layers import FusedLayers
from midfill.runners.torch.kernels.attention import rows_per_tile
from midfill.runners.torch.kernels.step_inputs import InputBuffers

_CAPTURED_OUTPUTS = (1, 2, 4, 8, 16, 32, 64)
_MOST_ROWS = 4096
_MOST_DECODES = 256
"""Of steps that are captured for requests with one row each."""
_MOST_KV_SLOTS = 1 << 21
"""Of all requests of a batch together: 256 of 8,192 tokens."""


class StepGraphs:
    """Runs whole forward passes. Everything is captured when it is made, which takes seconds.

    Args:
        decoder: on a CUDA GPU; its model ``is_fusible``, and experts are computed at once.
        rows, outputs: the numbers that are captured, ascending.
    """

    def __init__(
        self,
        decoder: Decoder,
        rows: Sequence[int],
        outputs: Sequence[int] = _CAPTURED_OUTPUTS,
    ) -> None:
        config, device = decoder.config, decoder.device
        self._decoder = decoder
        self._rows = tuple(rows)
        self._outputs = tuple(outputs)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._fused = FusedLayers(decoder, processors)
        self._tile = rows_per_tile(config.query_heads // config.kv_heads)
        self._buffers = InputBuffers(_MOST_ROWS, _MOST_KV_SLOTS, device)
        dtype = decoder.weights.embed.dtype
        self._normed = torch.zeros(_MOST_ROWS, config.hidden, device=device, dtype=dtype)
        self._logits = torch.zeros(self._outputs[-1], config.vocab, device=device)
        self._best = torch.zeros(self._outputs[-1], dtype=torch.int64, device=device)
        self._last: torch.Tensor | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._layers = {
            (count, tile): self._captured(self._run_layers, count, tile)
            for count in reversed(self._rows)  # the largest first: the others fit its memory
            for tile in self._tiles(count)
        }
        self._heads = {
            count: self._captured(self._run_head, count) for count in reversed(self._outputs)
        }

    def accepts(self, batch: ForwardBatch) -> bool:
        """Return whether ``forward`` can run a batch."""
        slots = self._decoder.kv_cache.keys.shape[1]
        named = batch.kv_slots
        return (
            0 < batch.rows <= _MOST_ROWS
            and 0 < len(named) <= _MOST_KV_SLOTS
            and not len(batch.observed_rows)
            and all(plan is None for plan in batch.attention)
            and bool(named.min() >= 0 and named.max() < slots)
        )

    def _tiles(self, rows: int) -> set[int]:
        """Return the sizes of tiles for which so many rows are captured."""
        if rows == 1:
            return {1}
        return {1, self._tile} if rows <= _MOST_DECODES else {self._tile}

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See ``Runner.forward``; the next call overwrites what is returned."""
        decodes = batch.rows == batch.requests <= _MOST_DECODES
        tile = 1 if decodes else self._tile
        rows = _next(self._rows, batch.rows)
        self._buffers.load(batch, rows or batch.rows, tile)
        if rows is None:
            self._run_layers(batch.rows, tile)
        else:
            self._layers[rows, tile].replay()
        wanted = len(batch.logit_rows)
        outputs = _next(self._outputs, wanted)
        if outputs is None:
            self._last = None
            rows_wanted = self._normed[torch.from_numpy(batch.logit_rows).to(self._normed.device)]
            return self._head(rows_wanted)
        if wanted:
            self._heads[outputs].replay()
        self._last = self._logits[:wanted]
        return self._last

    def argmax_tokens(self, logits: torch.Tensor) -> list[int] | None:
        """Return what ``Runner.argmax_tokens`` does if it is known already; None otherwise."""
        if logits is not self._last:
            return None
        best: list[int] = self._best[: len(logits)].tolist()
        return best

    def _run_layers(self, rows: int, tile: int) -> None:
        self._normed[:rows] = self._fused.run(self._buffers.inputs(rows, tile))

    def _run_head(self, outputs: int) -> None:
        wanted = self._buffers.inputs(outputs, 1).logit_rows
        logits = self._logits[:outputs]
        logits.copy_(self._head(self._normed.index_select(0, wanted)))
        values, ids = logits.max(dim=-1)
        self._best[:outputs] = torch.where(values.isfinite(), ids, -1)

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(normed, self._decoder.weights.head).float()
        divisor = self._decoder.config.logits_divisor
        return logits if divisor == 1.0 else logits / divisor

    def _captured(self, run: Callable[..., None], *sizes: int) -> torch.cuda.CUDAGraph:
        """Capture what a call launches, after it has run once: kernels are compiled then."""
        stream = torch.cuda.Stream(self._decoder.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(stream):
            run(*sizes)
        torch.cuda.current_stream(self._decoder.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run(*sizes)
        return graph


def _next(sizes: Sequence[int], count: int) -> int | None:
    """Return the least of some ascending sizes that is large enough."""
    place = int(np.searchsorted(sizes, count))
    return sizes[place] if place < len(sizes) else None
