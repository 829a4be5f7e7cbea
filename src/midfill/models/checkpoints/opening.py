"""Open a model: the checkpoint at a path, and the adapter that is merged into it."""

from pathlib import Path

from midfill.config import WeightsOption
from midfill.errors import CheckpointError, ModelNotFoundError
from midfill.models.checkpoints.adapted_checkpoint import AdaptedCheckpoint
from midfill.models.checkpoints.adapter import load_adapter
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.gguf import GgufCheckpoint
from midfill.models.checkpoints.huggingface import HuggingFaceCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or a folder with one GGUF file in it.

    Raises:
        ModelNotFoundError: the path holds nothing that could be a model.
        CheckpointError: the model is broken, truncated or of an unsupported kind.
    """
    if path.is_file():
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path}: name the folder it lies in, with its config.json")
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if (path / "config.json").is_file():
        return HuggingFaceCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{path}: holds several models, name one of them: {names}")
    raise ModelNotFoundError(f"{path}: holds neither a config.json nor a .gguf file")


def open_model(
    path: Path, adapter: Path | None = None, weights: WeightsOption = "auto"
) -> Checkpoint:
    """Open a checkpoint, with an adapter merged into it if one is given.

    Args:
        path: see ``open_checkpoint``.
        adapter: an adapter's folder; None for none.
        weights: how the weights will be stored. "q8" and "f32" can represent more of the update
            than a quantised base's own grid, so the merge is then exact.

    Raises:
        ModelNotFoundError: there is no model, or no adapter.
        CheckpointError: one of them is broken, or they do not fit each other.
    """
    base = open_checkpoint(path)
    if adapter is None:
        return base
    return AdaptedCheckpoint(base, load_adapter(adapter, base), exact=weights in ("q8", "f32"))


def model_digest(checkpoint: Checkpoint) -> str:
    """Return the digest under which what is measured of a model is kept.

    It is the same however the adapter is merged and the weights are stored: that changes answers
    little.
    """
    if isinstance(checkpoint, AdaptedCheckpoint):
        return AdaptedCheckpoint(checkpoint.base, checkpoint.adapter).content_digest
    return checkpoint.content_digest
