"""What midfill.json may say about any model, adapted or not: its prompts, and where answers end.

    "cut": {"least_increment": 400, "measured": {...}}
    "window": {"before": 1200, "after": 400, "measured": {...}}
    "snippets": {"characters": 2000, "measured": {...}}
    "end": {"logit_bias": 2.0, "measured": {...}}
    "empty": {"threshold": 0.15, "measured": {...}}
    "line_start": {"opens_line": true, "measured": {...}}

It may be an adapter's midfill.json, or one in a Hugging Face folder. A GGUF file may have the keys
``midfill.least_increment``, ``midfill.window.before``, ``midfill.window.after``,
``midfill.snippets.characters``, ``midfill.end_logit_bias``, ``midfill.empty_threshold`` and
``midfill.opens_lines`` instead. ``infill/prefix_cut.py``, ``infill/window.py``,
``infill/context_files.py``, ``engine/sampling/empty_answer.py`` and ``infill/planner.py`` explain
them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from midfill.errors import CheckpointError, MidfillError
from midfill.infill.context_files import DEFAULT_SNIPPET_CHARACTERS
from midfill.infill.prefix_cut import DEFAULT_RULE, CutRule
from midfill.infill.window import DEFAULT_WINDOW, WindowRule
from midfill.models.checkpoints.checkpoint import (
    EMPTY_THRESHOLD_KEY,
    END_BIAS_KEY,
    LEAST_INCREMENT_KEY,
    OPENS_LINES_KEY,
    SNIPPETS_KEY,
    WINDOW_AFTER_KEY,
    WINDOW_BEFORE_KEY,
    DescribedModel,
)
from midfill.models.tokens.huggingface_tokenizer import read_json
from midfill.system.files import write_file

RECORD_FILE = "midfill.json"
RECORD_FORMAT = 1
MAX_LEAST_INCREMENT = 100_000
"""Characters. A model that asks for so many always gets the whole prefix after the suffix."""

_MAX_WINDOW = 4_000_000  # characters, on either side; more are never accepted
_MAX_SNIPPETS = 4_000_000  # characters
_BIASES = -100.0, 100.0
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


def read_window(path: Path, record: Mapping[str, object]) -> WindowRule | None:
    """Return the window of a midfill.json, None where it says nothing.

    Raises:
        CheckpointError: it is no sensible window.
    """
    if "window" not in record:
        return None
    window = record["window"]
    if not isinstance(window, Mapping) or not {"before", "after"} <= set(window):
        raise CheckpointError(f"{path}: 'window' must be an object with 'before' and 'after'")
    return WindowRule(
        _checked(window["before"], path, "window.before", 1, _MAX_WINDOW),
        _checked(window["after"], path, "window.after", 0, _MAX_WINDOW),
    )


def read_snippets(path: Path, record: Mapping[str, object]) -> int | None:
    """Return how many characters of snippets a midfill.json asks for, None where it says nothing.

    Raises:
        CheckpointError: it is no sensible number.
    """
    if "snippets" not in record:
        return None
    section = record["snippets"]
    if not isinstance(section, Mapping) or "characters" not in section:
        raise CheckpointError(f"{path}: 'snippets' must be an object with 'characters'")
    return _checked(section["characters"], path, "snippets.characters", 0, _MAX_SNIPPETS)


def snippet_characters_of(checkpoint: DescribedModel) -> int:
    """Return how many characters of snippets to show; the default where a model doesn't say.

    Raises:
        CheckpointError: its metadata holds nonsense.
    """
    if SNIPPETS_KEY not in checkpoint.metadata:
        return DEFAULT_SNIPPET_CHARACTERS
    found = checkpoint.metadata[SNIPPETS_KEY]
    return _checked(found, checkpoint.path, SNIPPETS_KEY, 0, _MAX_SNIPPETS)


def read_end_bias(path: Path, record: Mapping[str, object]) -> float | None:
    """Return the end tokens' logit bias of a midfill.json, None where it says nothing.

    A model that learned to infill from few tokens is too sure, or not sure enough, that an answer
    is complete. The bias sets that right without touching what it writes.

    Raises:
        CheckpointError: it is no sensible number.
    """
    if "end" not in record:
        return None
    end = record["end"]
    if not isinstance(end, Mapping) or "logit_bias" not in end:
        raise CheckpointError(f"{path}: 'end' must be an object with 'logit_bias'")
    return _checked_number(end["logit_bias"], path, "end.logit_bias", *_BIASES)


def end_bias_of(checkpoint: DescribedModel) -> float:
    """Return what is added to a model's end tokens' logits; 0 where its metadata says nothing.

    Raises:
        CheckpointError: its metadata holds nonsense.
    """
    if END_BIAS_KEY not in checkpoint.metadata:
        return 0.0
    found = checkpoint.metadata[END_BIAS_KEY]
    return _checked_number(found, checkpoint.path, END_BIAS_KEY, *_BIASES)


def read_empty_threshold(path: Path, record: Mapping[str, object]) -> float | None:
    """Return the threshold of empty answers of a midfill.json, None where it says nothing.

    Raises:
        CheckpointError: it is no probability.
    """
    if "empty" not in record:
        return None
    empty = record["empty"]
    if not isinstance(empty, Mapping) or "threshold" not in empty:
        raise CheckpointError(f"{path}: 'empty' must be an object with 'threshold'")
    return _checked_number(empty["threshold"], path, "empty.threshold", 0.0, 1.0)


def empty_threshold_of(checkpoint: DescribedModel) -> float:
    """Return how probable a model's empty answer must be; 0 where its metadata says nothing.

    Raises:
        CheckpointError: its metadata holds nonsense.
    """
    if EMPTY_THRESHOLD_KEY not in checkpoint.metadata:
        return 0.0
    found = checkpoint.metadata[EMPTY_THRESHOLD_KEY]
    return _checked_number(found, checkpoint.path, EMPTY_THRESHOLD_KEY, 0.0, 1.0)


def read_opens_lines(path: Path, record: Mapping[str, object]) -> bool | None:
    """Return whether a midfill.json asks for opened lines, None where it says nothing.

    ``infill/planner.py`` explains what that is.

    Raises:
        CheckpointError: it is neither true nor false.
    """
    if "line_start" not in record:
        return None
    section = record["line_start"]
    if not isinstance(section, Mapping) or "opens_line" not in section:
        raise CheckpointError(f"{path}: 'line_start' must be an object with 'opens_line'")
    return _checked_bool(section["opens_line"], path, "line_start.opens_line")


def opens_lines_of(checkpoint: DescribedModel) -> bool:
    """Return whether carets at line starts are answered as on an empty line; false by default.

    Raises:
        CheckpointError: its metadata holds nonsense.
    """
    if OPENS_LINES_KEY not in checkpoint.metadata:
        return False
    return _checked_bool(checkpoint.metadata[OPENS_LINES_KEY], checkpoint.path, OPENS_LINES_KEY)


def folder_metadata(folder: Path) -> dict[str, object]:
    """Return what a model folder's midfill.json adds to the checkpoint's metadata.

    Raises:
        CheckpointError: it is malformed.
    """
    path = folder / RECORD_FILE
    return read_needs(path, read_json(path, optional=True))


def read_needs(path: Path, record: Mapping[str, object]) -> dict[str, object]:
    """Return what a midfill.json says about prompts as metadata; nothing for what it doesn't say.

    Args:
        path: of the file, for errors.
        record: its content.

    Raises:
        CheckpointError: a section is malformed.
    """
    needs: dict[str, object | None] = {
        LEAST_INCREMENT_KEY: read_least_increment(path, record),
        SNIPPETS_KEY: read_snippets(path, record),
        END_BIAS_KEY: read_end_bias(path, record),
        EMPTY_THRESHOLD_KEY: read_empty_threshold(path, record),
        OPENS_LINES_KEY: read_opens_lines(path, record),
    }
    if (window := read_window(path, record)) is not None:
        needs |= {WINDOW_BEFORE_KEY: window.before, WINDOW_AFTER_KEY: window.after}
    return {key: value for key, value in needs.items() if value is not None}


def cut_rule_of(checkpoint: DescribedModel) -> CutRule:
    """Return the cut rule of a model; the default where its metadata says nothing.

    Raises:
        CheckpointError: its metadata holds nonsense.
    """
    if LEAST_INCREMENT_KEY not in checkpoint.metadata:
        return DEFAULT_RULE
    found = checkpoint.metadata[LEAST_INCREMENT_KEY]
    return CutRule(_checked(found, checkpoint.path, LEAST_INCREMENT_KEY))


def window_rule_of(checkpoint: DescribedModel) -> WindowRule:
    """Return how much of a long document a model should see; the default where it doesn't say.

    Raises:
        CheckpointError: its metadata holds nonsense.
    """
    numbers = {}
    for field, key, least in (
        ("before", WINDOW_BEFORE_KEY, 1),
        ("after", WINDOW_AFTER_KEY, 0),
    ):
        if key in checkpoint.metadata:
            found = checkpoint.metadata[key]
            numbers[field] = _checked(found, checkpoint.path, key, least, _MAX_WINDOW)
    return replace(DEFAULT_WINDOW, **numbers)


def check_folder(folder: Path, keys: str) -> None:
    """Check that a folder can have a midfill.json that is read.

    Args:
        folder: of an adapter or a Hugging Face model.
        keys: what a GGUF file may have instead, for the error.

    Raises:
        MidfillError: it is no adapter's or Hugging Face model's.
    """
    if not any((folder / name).is_file() for name in _FOLDERS):
        raise MidfillError(
            f"{folder}: is neither an adapter's nor a Hugging Face model's folder; in a GGUF file, "
            f"set {keys}"
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
    section = {"least_increment": least_increment, "measured": dict(measured)}
    return _write_section(folder, "cut", section, LEAST_INCREMENT_KEY)


def write_window(folder: Path, window: WindowRule, measured: Mapping[str, object]) -> Path:
    """Write a window into the midfill.json of an adapter's or model's folder, see ``write_cut``."""
    section = {"before": window.before, "after": window.after, "measured": dict(measured)}
    keys = f"{WINDOW_BEFORE_KEY} and {WINDOW_AFTER_KEY}"
    return _write_section(folder, "window", section, keys)


def write_snippets(folder: Path, characters: int, measured: Mapping[str, object]) -> Path:
    """Write how much of snippets to show into a folder's midfill.json, see ``write_cut``."""
    section = {"characters": characters, "measured": dict(measured)}
    return _write_section(folder, "snippets", section, SNIPPETS_KEY)


def write_empty(folder: Path, threshold: float, measured: Mapping[str, object]) -> Path:
    """Write the threshold of empty answers into a folder's midfill.json, see ``write_cut``."""
    section = {"threshold": threshold, "measured": dict(measured)}
    return _write_section(folder, "empty", section, EMPTY_THRESHOLD_KEY)


def _write_section(folder: Path, name: str, section: Mapping[str, object], keys: str) -> Path:
    check_folder(folder, keys)
    path = folder / RECORD_FILE
    record = {"format": RECORD_FORMAT, **read_json(path, optional=True), name: section}
    write_file(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return path


def _checked(
    value: object, path: Path, field: str, least: int = 0, most: int = MAX_LEAST_INCREMENT
) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(
            f"{path}: {field!r} must be a whole number of characters from {least} to {most}, "
            f"not {_short(value)}"
        )
    return value


def _checked_number(value: object, path: Path, field: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise CheckpointError(
            f"{path}: {field!r} must be a number from {least:g} to {most:g}, not {_short(value)}"
        )
    return float(value)


def _checked_bool(value: object, path: Path, field: str) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {field!r} must be true or false, not {_short(value)}")
    return value


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
