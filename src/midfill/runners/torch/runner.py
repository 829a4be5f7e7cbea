"""TorchRunner: the model through plain torch, on CUDA or as the reference on the CPU."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from midfill.arrays import Float32Array, RunnerArray
from midfill.errors import OptionError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.cells import CellStore
from midfill.runners.forward.logits import LogitsOps, argmax_tokens
from midfill.runners.rope import layer_frequencies
from midfill.runners.torch.cells import TorchCells
from midfill.runners.torch.decoder import Decoder, KVCache
from midfill.runners.torch.experts.assignment import ExpertCosts
from midfill.runners.torch.logits import TorchLogits
from midfill.runners.torch.state_space import TorchStates
from midfill.runners.torch.weights import load_weights

if TYPE_CHECKING:
    from midfill.runners.torch.graphs import StepGraphs

DEFAULT_STATES = 16
_LEAST_CAPABILITY = (8, 0)
"""From here on GPUs multiply bfloat16."""
CAPTURED_ROWS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    *(384, 512, 768, 1024, 1536, 2048),
)
"""Steps of up to 48 rows are what keystrokes and answers compute."""


class TorchRunner:
    """Implements ``runners.forward.runner.Runner`` on any device of torch.

    ``embed``, ``run_layers`` and ``compute_logits`` run a step in parts, over hidden rows that the
    caller owns.

    Args:
        config: the model's shapes.
        decoder: computes; holds the weights and the KV cache.
        captured_rows: numbers of rows for which whole steps are captured as CUDA graphs, where
            there are kernels for it; empty runs PyTorch's own operations.

    Attributes:
        decoder: see above.
        graphs: computes whole steps where it can; None where nothing is captured.
    """

    def __init__(
        self, config: ModelConfig, decoder: Decoder, captured_rows: Sequence[int] = ()
    ) -> None:
        self.config = config
        self.decoder = decoder
        self.logits_ops: LogitsOps = NUMPY_LOGITS if decoder.device.type == "cpu" else TorchLogits()
        self.graphs = _capture(decoder, captured_rows)

    @property
    def slots(self) -> int:
        return self.decoder.kv_cache.keys.shape[1]

    @property
    def kv_bytes(self) -> int:
        states = self.decoder.states
        return self.decoder.kv_cache.bytes + (0 if states is None else states.nbytes)

    @property
    def states(self) -> TorchStates | None:
        """See ``Runner.states``."""
        return self.decoder.states

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weights.bytes

    @property
    def cells(self) -> CellStore:
        """The KV cache, cell by cell."""
        cache = self.decoder.kv_cache
        return TorchCells(cache.keys, cache.values, layer_frequencies(self.config))

    @property
    def description(self) -> str:
        graphs = "" if self.graphs is None else ", CUDA graphs"
        return f"PyTorch on {self.decoder.device}{graphs}"

    @property
    def build(self) -> str:
        return f"torch {torch.__version__} {self.description}"

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """See ``Runner.forward`` and ``compute_logits``."""
        if self.graphs is not None and self.graphs.accepts(batch):
            return self.graphs.forward(batch)
        layers = self.config.layers
        if not batch.needs_only_outputs(self.config):
            hidden = self.run_layers(batch, self.embed(batch), 0, layers)
            return self.compute_logits(batch, hidden)
        last = layers - self.config.kv_sharing_layers
        hidden = self.run_layers(batch, self.embed(batch), 0, last)
        if len(batch.logit_rows):
            rows = torch.from_numpy(batch.logit_rows).to(hidden.device, torch.int64)
            batch, hidden = batch.only_outputs(), hidden[rows]
            hidden = self.run_layers(batch, hidden, last, layers)
        return self.compute_logits(batch, hidden)

    def argmax_tokens(self, logits: RunnerArray) -> list[int]:
        """See ``Runner.argmax_tokens``."""
        if self.graphs is not None:
            found = self.graphs.argmax_tokens(logits)
            if found is not None:
                return found
        return argmax_tokens(self.logits_ops, logits)

    def observed_queries(
        self, batch: ForwardBatch, first: int = 0, end: int | None = None
    ) -> Float32Array:
        """See ``Runner.observed_queries``."""
        observed = [found.float().cpu() for found in self.decoder.observed[first:end]]
        queries: Float32Array = torch.stack(observed).numpy()
        return queries

    @torch.inference_mode()
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the tokens' embeddings: hidden rows [rows, row_width], on the runner's device."""
        return self.decoder.embed(batch)

    @torch.inference_mode()
    def run_layers(
        self, batch: ForwardBatch, hidden: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        """Run layers first <= i < end; see ``Decoder.run_layers``."""
        return self.decoder.run_layers(self.decoder.prepare(batch, first), hidden, first, end)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Runner.join``."""
        return torch.cat(list(parts))

    @torch.inference_mode()
    def compute_logits(self, batch: ForwardBatch, hidden: torch.Tensor) -> RunnerArray:
        """Return the logits [outputs, vocab] float32 of the rows that want them.

        They stay on the runner's device; on the CPU, they are an array of NumPy.
        """
        logits = self.decoder.compute_logits(batch, hidden)
        return logits.numpy() if logits.device.type == "cpu" else logits


def load_torch_runner(
    checkpoint: Checkpoint,
    *,
    slots: int,
    states: int = DEFAULT_STATES,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    expert_slots: int | None = None,
    expert_costs: ExpertCosts | None = None,
    captured_rows: Sequence[int] = (),
) -> TorchRunner:
    """Copy a model to a device of torch, with a KV cache for it.

    Args:
        checkpoint: the model.
        slots: how many tokens' KV to make room for.
        states: how many states, if the model has any.
        device: "cpu", "cuda", "cuda:1", ...
        dtype: of weights, KV and hidden rows; logits are always float32.
        expert_slots, expert_costs: see ``Decoder``.
        captured_rows: see ``TorchRunner``.

    Raises:
        CheckpointError: a tensor can't be read.
        OptionError: torch finds no such device.
    """
    config, target = checkpoint.config, _find_device(device)
    weights = load_weights(checkpoint, target, dtype, offload_experts=expert_slots is not None)
    space = config.state_space
    decoder = Decoder(
        config, weights, KVCache.empty(config, slots, target, dtype),
        None if space is None else TorchStates(space, states, target),
        expert_slots=expert_slots, expert_costs=expert_costs,
    )  # fmt: skip
    return TorchRunner(config, decoder, captured_rows)


def _capture(decoder: Decoder, rows: Sequence[int]) -> "StepGraphs | None":
    """Give a decoder the kernels that there are for it; capture steps if they are all it needs."""
    if not rows or not _runs_triton(decoder.device):
        return None
    # Imported where they are used: they need Triton, which only PyTorch for CUDA brings.
    from midfill.runners.torch.fused_layers import is_fusible
    from midfill.runners.torch.graphs import StepGraphs
    from midfill.runners.torch.kernels.experts import expand_experts

    decoder.grouped_experts = expand_experts
    if decoder.offloaded is not None or not is_fusible(decoder.config):
        return None
    with torch.inference_mode():
        return StepGraphs(decoder, rows)


def _runs_triton(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
        and find_spec("triton") is not None
    )


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # torch's messages have many lines; the first names the cause.
        reason = str(error).splitlines()[0]
        raise OptionError(f"--device {name!r} can't be used ({reason}); try 'cpu'") from error
    return device
