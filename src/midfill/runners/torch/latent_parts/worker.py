"""The process of one part: it loads the model, keeps its part, and runs what it is told.

Started by ``runner`` as ``python -m midfill.runners.torch.latent_parts.worker FD RANK``. Messages
come through the socket with that number. When it closes, because the engine's process ended or
died, this one ends, too; so it does when a step fails, since the parts are no longer at the same
place then.
"""

import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from midfill.errors import MidfillError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_model
from midfill.runners.rope import layer_frequencies
from midfill.runners.torch.cells import TorchCells
from midfill.runners.torch.latent_parts.group import ProcessGroup
from midfill.runners.torch.latent_parts.messages import (
    CellCall,
    Load,
    PartShape,
    Run,
    receive,
    send,
)
from midfill.runners.torch.latent_parts.part import LatentPart, cut_weights
from midfill.runners.torch.latent_parts.rotation import LatentRotation
from midfill.runners.torch.weights import DecoderWeights, load_weights


def join_parts(
    checkpoint: Checkpoint,
    weights: DecoderWeights,
    rotation: LatentRotation,
    rank: int,
    shape: PartShape,
    folder: Path,
) -> tuple[LatentPart, ProcessGroup]:
    """Cut a part out of a model and meet the others; they have to do so at the same time.

    Args:
        checkpoint: the model.
        weights: all of it.
        rotation: how its latents are turned.
        rank: the part's number.
        shape: of all parts.
        folder: where the processes find each other.
    """
    config = checkpoint.config
    cut = cut_weights(config, weights, rotation, rank)
    group = ProcessGroup(folder, rank, shape.parts, shape.device_of(rank))
    return LatentPart(config, cut, shape.slots, group), group


def part_cells(part: LatentPart) -> TorchCells:
    """Return a part's KV cache, cell by cell."""
    cache = part.kv_cache
    return TorchCells(cache.keys, cache.values, layer_frequencies(part.config))


def main(connection: Connection, rank: int) -> NoReturn:
    """Load the part and do what the messages say until there are no more."""
    # The engine's process decides when it is time to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        _serve(connection, rank)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


@torch.inference_mode()
def _serve(connection: Connection, rank: int) -> NoReturn:
    load = receive(connection)
    assert isinstance(load, Load)
    shape = load.shape
    torch.set_num_threads(shape.threads)
    try:
        checkpoint = open_model(load.path, load.adapter, load.weights)
        weights = load_weights(checkpoint, shape.device_of(rank), shape.dtype)
    except MidfillError as error:
        send(connection, str(error))
        sys.exit(1)
    send(connection, None)
    part, _ = join_parts(checkpoint, weights, receive(connection), rank, shape, load.folder)
    del weights
    while True:
        match receive(connection):
            case Run(batch, hidden, first, end):
                rows = part.embed(batch)
                if hidden is not None:
                    rows = torch.from_numpy(hidden).to(rows.device, rows.dtype)
                part.run_layers(part.prepare(batch, first), rows, first, end)
            case CellCall(name, arguments):
                send(connection, getattr(part_cells(part), name)(*arguments))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
