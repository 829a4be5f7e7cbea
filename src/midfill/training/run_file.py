"""run.json: what a folder's run is made of, so that no other run goes on in its place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.system.atomic import write_file
from midfill.training.recipe import TrainingRecipe

_RUN_FILE = "run.json"
_FREE = ("precision", "gradient_checkpointing")  # how, not what: may differ when a run goes on


def describe_run(
    checkpoint: Checkpoint, format: FimFormat, recipe: TrainingRecipe
) -> dict[str, Any]:
    """What decides what a run makes of its documents: base, sentinels and recipe; plain values."""
    sentinels = (format.prefix, format.suffix, format.middle)
    run = {
        "base": checkpoint.content_digest,
        "fim_tokens": [each.text for each in sentinels if each is not None],
        **recipe.as_dict(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(run))  # tuples become lists
    return plain


def claim_folder(folder: Path, run: Mapping[str, Any]) -> None:
    """Write down what a folder's run is, where that is not done yet.

    Raises:
        MidfillError: the folder can't be written.
    """
    if not (folder / _RUN_FILE).is_file():
        write_file(folder / _RUN_FILE, json.dumps(run, indent=2) + "\n")


def check_folder(folder: Path, run: Mapping[str, Any]) -> None:
    """Check that a folder's run, if there is one, is this run.

    Raises:
        MidfillError: it is another one; says what differs.
    """
    path = folder / _RUN_FILE
    if not path.is_file():
        return
    try:
        before = dict(_flat(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, AttributeError) as error:
        raise MidfillError(f"{path}: can't be read: {error}") from None
    differing = [
        f"{name} {before.get(name)!r} there, {value!r} now"
        for name, value in _flat(run)
        if name not in _FREE and before.get(name) != value
    ]
    if differing:
        raise MidfillError(
            f"{folder}: holds another run ({'; '.join(differing[:3])}); name another --output, or "
            "go on with the same settings"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value))
    return pairs
