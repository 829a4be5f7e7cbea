"""What midfill.json may say about any model, adapted or not: where its prompts should be cut.

    "cut": {"least_increment": 400, "measured": {...}}

It may be an adapter's midfill.json, or one in a Hugging Face folder. A GGUF file may have the key
``midfill.least_increment`` instead. ``infill/prefix_cut.py`` explains the number.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from midfill.checkpoints.checkpoint import LEAST_INCREMENT_KEY, Checkpoint
from midfill.errors import CheckpointError, MidfillError
from midfill.infill.prefix_cut import DEFAULT_RULE, CutRule
from midfill.system.atomic import write_file
from midfill.tokens.huggingface_tokenizer import read_json

RECORD_FILE = "midfill.json"
RECORD_FORMAT = 1

MAX_LEAST_INCREMENT = 100_000
"""Characters. A model that asks for so many always gets the whole prefix after the suffix."""

_FOLDERS = ("adapter_config.json", "config.json")


def read_least_increment(path: Path, record: Mapping[str, object]) -> int | None:
    """Return the least increment of a midfill.json, None where it says nothing.

    Raises:
        CheckpointError: it is no sensible number.
    """
    if "cut" not in record:
        return None
    cut = record["cut"]
    if not isinstance(cut, Mapping):
        raise CheckpointError(f"{path}: 'cut' must be an object with 'least_increment'")
    if "least_increment" not in cut:
        return None
    return _checked(cut["least_increment"], path, "cut.least_increment")


def folder_metadata(folder: Path) -> dict[str, object]:
    """Return what a model folder's midfill.json adds to the checkpoint's metadata.

    Raises:
        CheckpointError: it is malformed.
    """
    path = folder / RECORD_FILE
    least = read_least_increment(path, read_json(path, optional=True))
    return {} if least is None else {LEAST_INCREMENT_KEY: least}


def cut_rule_of(checkpoint: Checkpoint) -> CutRule:
    """Return the cut rule of a model; the default where its metadata says nothing.

    Raises:
        CheckpointError: its metadata holds nonsense.
    """
    if LEAST_INCREMENT_KEY not in checkpoint.metadata:
        return DEFAULT_RULE
    found = checkpoint.metadata[LEAST_INCREMENT_KEY]
    return CutRule(_checked(found, checkpoint.path, LEAST_INCREMENT_KEY))


def check_folder(folder: Path) -> None:
    """Check that a folder can have a midfill.json that is read.

    Raises:
        MidfillError: it is no adapter's or Hugging Face model's.
    """
    if not any((folder / name).is_file() for name in _FOLDERS):
        raise MidfillError(
            f"{folder}: is neither an adapter's nor a Hugging Face model's folder; in a GGUF file, "
            f"set the key {LEAST_INCREMENT_KEY}"
        )


def write_cut(folder: Path, least_increment: int, measured: Mapping[str, object]) -> Path:
    """Write the least increment into the midfill.json of an adapter's or model's folder.

    Args:
        folder: of an adapter or a Hugging Face model; the rest of its midfill.json is kept.
        least_increment: characters.
        measured: how it was found, plain values.

    Returns:
        The file.

    Raises:
        MidfillError: it is no such folder, or the file is malformed or can't be written.
    """
    check_folder(folder)
    path = folder / RECORD_FILE
    record = {"format": RECORD_FORMAT, **read_json(path, optional=True)}
    record["cut"] = {"least_increment": least_increment, "measured": dict(measured)}
    write_file(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return path


def _checked(value: object, path: Path, field: str) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 0 <= value <= MAX_LEAST_INCREMENT
    ):
        raise CheckpointError(
            f"{path}: {field!r} must be a whole number of characters from 0 to "
            f"{MAX_LEAST_INCREMENT}, not {_short(value)}"
        )
    return value


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
