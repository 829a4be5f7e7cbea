"""The end of a run: its folders, its record, its loss curve."""

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from midfill.checkpoints.requantise import DEFAULT_ROUNDING, Rounding
from midfill.system.atomic import write_file
from midfill.training.adapter_folder import adapter_record, write_adapter, write_model
from midfill.training.card import model_card
from midfill.training.checkpoints import Progress
from midfill.training.grid import ROUNDING
from midfill.training.loss_log import read_loss_log
from midfill.training.loss_plot import plot_loss
from midfill.training.recipe import TrainingRecipe
from midfill.training.run import FimRun, RunInputs
from midfill.training.trainer import LOSS_LOG, precision_of
from midfill.version import __version__

MANIFEST = "manifest.jsonl"


def finish(
    run: FimRun,
    recipe: TrainingRecipe,
    inputs: RunInputs,
    progress: Progress,
    *,
    merge: Path | None,
    machine: str,
) -> list[str]:
    """Write what a finished run leaves behind.

    Args:
        run, recipe, inputs: the run.
        progress: where it ended.
        merge: folder for the whole model; None writes the adapter alone.
        machine: what it was trained on, for the record.

    Returns:
        A line for each thing written.

    Raises:
        MidfillError: something can't be written.
    """
    folder = inputs.folder
    manifest = "".join(
        json.dumps({"name": name, "sha256": digest}) + "\n"
        for name, digest in sorted((name, key) for key, name in run.stream.manifest.items())
    )
    write_file(folder / MANIFEST, manifest)
    record = adapter_record(
        run.checkpoint,
        run.format,
        run.end_token_id,
        recipe.data.fragments,
        _rounding(run, recipe),
        name=inputs.base_name,
        training=_training(recipe, progress, folder / LOSS_LOG, machine),
        data=_data(run, manifest),
        recipe=recipe.as_dict(),
    )
    written = []
    model = run.trainer.model
    if recipe.method == "lora":
        write_adapter(folder / "adapter", model, record, model_card(record, adapter=True))
        written.append(f"adapter: {folder / 'adapter'} (midfill serve MODEL --adapter ...)")
    if merge is not None or recipe.method == "full":
        target = merge or folder / "model"
        card = model_card(record, adapter=False)
        write_model(target, model, run.checkpoint, run.format, record, card)
        written.append(f"model: {target} (midfill serve {target})")
    try:
        plot_loss(folder / LOSS_LOG, folder / "loss.png")
        written.append(f"loss curve: {folder / 'loss.png'}")
    except ImportError:  # matplotlib comes with the extra for training, but is not needed
        written.append(f"loss of each step: {folder / LOSS_LOG}")
    return written


def _rounding(run: FimRun, recipe: TrainingRecipe) -> Rounding:
    """The rule the adapter was trained through, or the usual one."""
    through = run.trainer.grid is not None and recipe.grid_from < 1
    return ROUNDING if through else DEFAULT_ROUNDING


def _training(
    recipe: TrainingRecipe, progress: Progress, log: Path, machine: str
) -> dict[str, Any]:
    losses = [line["loss"] for line in read_loss_log(log)]
    tenth = max(1, len(losses) // 10)
    return {
        "made_with": f"midfill {__version__}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "precision": precision_of(recipe.precision),
        "steps": progress.step,
        "tokens": progress.tokens,
        "characters": progress.characters,
        "hours": round(progress.seconds / 3600, 2),
        "first_loss": round(sum(losses[:tenth]) / tenth, 4),
        "last_loss": round(sum(losses[-tenth:]) / tenth, 4),
    }


def _data(run: FimRun, manifest: str) -> dict[str, Any]:
    """What was trained on: counts and licences of the documents, those refused in one pass."""
    stream = run.stream
    return {
        "documents": len(stream.manifest),
        "passes": stream.place.epoch + 1,
        "examples": stream.examples,
        "licences": dict(stream.licences.most_common()),
        "refused": dict(stream.refused.most_common()),
        "sources": _sources(stream.manifest.values()),
        "manifest_sha256": hashlib.sha256(manifest.encode()).hexdigest(),
    }


def _sources(names: Iterable[str]) -> str:
    """The folders right below the sources, which are packages, most of the time."""
    folders = {name.split("/")[1] for name in names if name.count("/") > 1}
    return ", ".join(sorted(folders, key=str.lower))
