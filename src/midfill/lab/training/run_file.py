"""run.json: what decides a folder's run, so that no other run continues in its place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.lab.training.recipe import TrainingRecipe, with_current_names
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.system.files import write_file

_RUN_FILE = "run.json"
_MAY_CHANGE = ("precision", "gradient_checkpointing")  # settings that may differ on resuming


def describe_run(
    checkpoint: Checkpoint, format: FimFormat, recipe: TrainingRecipe
) -> dict[str, Any]:
    """Return what decides a run besides its documents: base, sentinels, recipe; plain values."""
    sentinels = (format.prefix, format.suffix, format.middle)
    run = {
        "base": checkpoint.content_digest,
        "fim_tokens": [each.text for each in sentinels if each is not None],
        **recipe.as_dict(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(run))  # tuples become lists
    return plain


def claim_folder(folder: Path, run: Mapping[str, Any]) -> None:
    """Write the description of a folder's run, unless it is already there.

    Raises:
        MidfillError: the folder can't be written.
    """
    if not (folder / _RUN_FILE).is_file():
        write_file(folder / _RUN_FILE, json.dumps(run, indent=2) + "\n")


def check_folder(folder: Path, run: Mapping[str, Any]) -> None:
    """Check that a folder belongs to this run or to none.

    Raises:
        MidfillError: it belongs to another; the message says what differs.
    """
    path = folder / _RUN_FILE
    if not path.is_file():
        return
    try:
        before = dict(_flatten(with_current_names(json.loads(path.read_text(encoding="utf-8")))))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise MidfillError(f"{path}: can't be read: {error}") from None
    differing = [
        f"{name} {before.get(name)!r} there, {value!r} now"
        for name, value in _flatten(run)
        if name not in _MAY_CHANGE and before.get(name) != value
    ]
    if differing:
        raise MidfillError(
            f"{folder}: holds another run ({'; '.join(differing[:3])}); use another --output, or "
            "continue with the same settings"
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value))
    return pairs
