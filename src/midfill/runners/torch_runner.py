"""TorchRunner: the model through plain torch, on CUDA or as the reference on the CPU."""

import torch

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.errors import MidfillError
from midfill.forward.batch import ForwardBatch
from midfill.runners.torch_decoder import Cells, Decoder
from midfill.runners.torch_weights import load_weights


class TorchRunner:
    """Implements ``forward.runner.Runner`` on any device torch has.

    Args:
        checkpoint: the model; its weights are put on the device, once.
        slots: how many tokens' KV to make room for.
        device: "cpu", "cuda", "cuda:1", ...
        dtype: of weights, KV and hidden rows; logits are always float32.

    Raises:
        CheckpointError: a tensor can't be read.
        MidfillError: torch sees no such device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        slots: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = checkpoint.config
        target = _find_device(device)
        weights = load_weights(checkpoint, target, dtype)
        cells = Cells.empty(self.config, slots, target, dtype)
        self.decoder = Decoder(self.config, weights, cells)

    @property
    def slots(self) -> int:
        return self.decoder.cells.keys.shape[1]

    @property
    def kv_bytes(self) -> int:
        return self.decoder.cells.bytes

    @property
    def weight_bytes(self) -> int:
        return self.decoder.weights.bytes

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See ``Runner.forward``; the logits lie on the runner's device."""
        decoder = self.decoder
        state = decoder.prepare(batch)
        hidden = decoder.run_layers(decoder.embed(batch), state, 0, self.config.layers)
        return decoder.logits(hidden, batch)


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # torch's messages run over many lines; the first says it.
        reason = str(error).splitlines()[0]
        raise MidfillError(f"device {name!r} is not usable ({reason}); try 'cpu'") from error
    return device
