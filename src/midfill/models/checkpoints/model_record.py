"""What midfill.json may say about any model, adapted or not: its prompts, and where answers end.

    "cut": {"least_increment": 400, "measured": {...}}
    "window": {"before": 1200, "after": 400, "measured": {...}}
    "snippets": {"characters": 2000, "measured": {...}}
    "end": {"logit_bias": 2.0, "measured": {...}}
    "empty": {"threshold": 0.15, "measured": {...}}
    "confidence": {"line": [...], "start": [...], "threshold": 0.5, "measured": {...}}
    "line_start": {"opens_line": true, "measured": {...}}
    "raw_prompt": {"bos": "<|endoftext|>", "measured": {...}}
    "reuse": {"method": "cacheblend:ratio=0.4,order=caret", "measured": {...}}

It may be an adapter's midfill.json, or one in a Hugging Face folder. A GGUF file may have the keys
``midfill.least_increment``, ``midfill.window.before``, ``midfill.window.after``,
``midfill.snippets.characters``, ``midfill.end_logit_bias``, ``midfill.empty_threshold``,
``midfill.confidence.line``, ``midfill.confidence.start``, ``midfill.confidence.threshold``,
``midfill.opens_lines``, ``midfill.raw_prompt_bos`` and ``midfill.reuse.method`` instead.
``infill/prefix_cut.py``, ``infill/window.py``, ``infill/context_files.py``,
``engine/sampling/empty_answer.py``, ``infill/confidence.py``, ``infill/planner.py`` and
``methods/resolver.py`` explain them. An estimator of confidence is five numbers: the intercept and
the weights of the features, in the order of ``Features``.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from midfill.errors import CheckpointError, MidfillError
from midfill.infill.confidence import ConfidenceRule, Estimator
from midfill.infill.context_files import DEFAULT_SNIPPET_CHARACTERS
from midfill.infill.prefix_cut import DEFAULT_RULE, CutRule
from midfill.infill.window import DEFAULT_WINDOW, WindowRule
from midfill.models.checkpoints.checkpoint import (
    CONFIDENCE_LINE_KEY,
    CONFIDENCE_START_KEY,
    CONFIDENCE_THRESHOLD_KEY,
    EMPTY_THRESHOLD_KEY,
    END_BIAS_KEY,
    LEAST_INCREMENT_KEY,
    OPENS_LINES_KEY,
    RAW_BOS_KEY,
    REUSE_KEY,
    SNIPPETS_KEY,
    WINDOW_AFTER_KEY,
    WINDOW_BEFORE_KEY,
    DescribedModel,
)
from midfill.models.tokens.huggingface_tokenizer import read_json
from midfill.system.files import write_file

T = TypeVar("T")

RECORD_FILE = "midfill.json"
RECORD_FORMAT = 1
MAX_LEAST_INCREMENT = 100_000
"""Characters. A model that asks for so many always gets the whole prefix after the suffix."""

REUSE_OFF = "off"
"""Stated of a model whose infilling prompts are to be computed exactly."""

_MAX_WINDOW = 4_000_000  # characters, on either side; more are never accepted
_MAX_SNIPPETS = 4_000_000  # characters
_FOLDERS = ("adapter_config.json", "config.json")


@dataclass(frozen=True)
class _Need(Generic[T]):
    """Something that a model may state about its prompts or answers.

    Attributes:
        key: its metadata key.
        default: what holds where a model doesn't state it.
        check: takes a stated value, the file's path and the value's name there; returns it, or
            raises a CheckpointError.
    """

    key: str
    default: T
    check: Callable[[object, Path, str], T]

    def of(self, model: DescribedModel) -> T:
        """Return what a model's metadata states.

        Raises:
            CheckpointError: that is nonsense.
        """
        if self.key not in model.metadata:
            return self.default
        return self.check(model.metadata[self.key], model.path, self.key)


def _characters(least: int, most: int) -> Callable[[object, Path, str], int]:
    """Return the check of a number of characters."""

    def check(value: object, path: Path, field: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CheckpointError(
                f"{path}: {field!r} must be a whole number of characters from {least} to {most}, "
                f"not {_short(value)}"
            )
        return value

    return check


def _number(least: float, most: float) -> Callable[[object, Path, str], float]:
    """Return the check of a number."""

    def check(value: object, path: Path, field: str) -> float:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
        if number is None or not least <= number <= most:
            raise CheckpointError(
                f"{path}: {field!r} must be a number from {least:g} to {most:g}, "
                f"not {_short(value)}"
            )
        return float(number)

    return check


def _estimator(value: object, path: Path, field: str) -> tuple[float, ...]:
    """Check the numbers of an estimator, and return them."""
    count = len(Estimator.__slots__)
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(numbers) != count or not all(
        isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each)
        for each in numbers
    ):
        raise CheckpointError(f"{path}: {field!r} must be {count} numbers, not {_short(value)}")
    return tuple(map(float, numbers))


def _flag(value: object, path: Path, field: str) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {field!r} must be true or false, not {_short(value)}")
    return value


def _token(value: object, path: Path, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{path}: {field!r} must be the text of a token, not {_short(value)}")
    return value


def _specification(value: object, path: Path, field: str) -> str:
    """Check what may be a method's specification; which ones there are isn't known here."""
    if not isinstance(value, str) or not value:
        raise CheckpointError(
            f"{path}: {field!r} must be the specification of a method or {REUSE_OFF!r}, not"
            f" {_short(value)}"
        )
    return value


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."


_LEAST_INCREMENT = _Need(
    LEAST_INCREMENT_KEY, DEFAULT_RULE.least_increment, _characters(0, MAX_LEAST_INCREMENT)
)
_WINDOW_BEFORE = _Need(WINDOW_BEFORE_KEY, DEFAULT_WINDOW.before, _characters(1, _MAX_WINDOW))
_WINDOW_AFTER = _Need(WINDOW_AFTER_KEY, DEFAULT_WINDOW.after, _characters(0, _MAX_WINDOW))
_SNIPPETS = _Need(SNIPPETS_KEY, DEFAULT_SNIPPET_CHARACTERS, _characters(0, _MAX_SNIPPETS))
_END_BIAS = _Need(END_BIAS_KEY, 0.0, _number(-100.0, 100.0))
_EMPTY_THRESHOLD = _Need(EMPTY_THRESHOLD_KEY, 0.0, _number(0.0, 1.0))
_CONFIDENCE_LINE = _Need[tuple[float, ...]](CONFIDENCE_LINE_KEY, (), _estimator)
_CONFIDENCE_START = _Need[tuple[float, ...]](CONFIDENCE_START_KEY, (), _estimator)
_CONFIDENCE_THRESHOLD = _Need(CONFIDENCE_THRESHOLD_KEY, 0.0, _number(0.0, 1.0))
_OPENS_LINES = _Need(OPENS_LINES_KEY, False, _flag)
_RAW_BOS = _Need(RAW_BOS_KEY, "", _token)
_REUSE = _Need(REUSE_KEY, REUSE_OFF, _specification)

_SECTIONS: Mapping[str, Mapping[str, _Need[Any]]] = {
    "cut": {"least_increment": _LEAST_INCREMENT},
    "snippets": {"characters": _SNIPPETS},
    "end": {"logit_bias": _END_BIAS},
    "empty": {"threshold": _EMPTY_THRESHOLD},
    "confidence": {
        "line": _CONFIDENCE_LINE,
        "start": _CONFIDENCE_START,
        "threshold": _CONFIDENCE_THRESHOLD,
    },
    "line_start": {"opens_line": _OPENS_LINES},
    "raw_prompt": {"bos": _RAW_BOS},
    "reuse": {"method": _REUSE},
    "window": {"before": _WINDOW_BEFORE, "after": _WINDOW_AFTER},
}
"""What the sections of a midfill.json state. "cut" may hold nothing but how it was measured."""

NEED_KEYS = frozenset(need.key for fields in _SECTIONS.values() for need in fields.values())
"""The metadata keys of all that a midfill.json states here."""


def read_needs(path: Path, record: Mapping[str, object]) -> dict[str, object]:
    """Return what a midfill.json says about prompts as metadata; nothing for what it doesn't say.

    Args:
        path: of the file, for errors.
        record: its content.

    Raises:
        CheckpointError: a section is malformed.
    """
    needs: dict[str, object] = {}
    for name, fields in _SECTIONS.items():
        if name not in record:
            continue
        section = record[name]
        if not isinstance(section, Mapping) or (name != "cut" and not set(fields) <= set(section)):
            expected = " and ".join(map(repr, fields))
            raise CheckpointError(f"{path}: {name!r} must be an object with {expected}")
        for field, need in fields.items():
            if field in section:
                needs[need.key] = need.check(section[field], path, f"{name}.{field}")
    return needs


def folder_metadata(folder: Path) -> dict[str, object]:
    """Return what a model folder's midfill.json adds to the checkpoint's metadata.

    Raises:
        CheckpointError: it is malformed.
    """
    path = folder / RECORD_FILE
    return read_needs(path, read_json(path, optional=True))


def cut_rule_of(checkpoint: DescribedModel) -> CutRule:
    """Return the cut rule of a model; the default where its metadata says nothing.

    Raises:
        CheckpointError: its metadata holds nonsense, here as below.
    """
    return CutRule(_LEAST_INCREMENT.of(checkpoint))


def window_rule_of(checkpoint: DescribedModel) -> WindowRule:
    """Return how much of a long document a model should see; the default where it doesn't say."""
    return WindowRule(_WINDOW_BEFORE.of(checkpoint), _WINDOW_AFTER.of(checkpoint))


def snippet_characters_of(checkpoint: DescribedModel) -> int:
    """Return how many characters of snippets to show; the default where a model doesn't say."""
    return _SNIPPETS.of(checkpoint)


def end_bias_of(checkpoint: DescribedModel) -> float:
    """Return what is added to a model's end tokens' logits; 0 where its metadata says nothing.

    A model that learned to infill from few tokens is too sure, or not sure enough, that an answer
    is complete. The bias sets that right without touching what it writes.
    """
    return _END_BIAS.of(checkpoint)


def empty_threshold_of(checkpoint: DescribedModel) -> float:
    """Return how probable a model's empty answer must be; 0 where its metadata says nothing."""
    return _EMPTY_THRESHOLD.of(checkpoint)


def confidence_rule_of(checkpoint: DescribedModel) -> ConfidenceRule | None:
    """Return how sure a model's answers are; None where its metadata doesn't say."""
    line, start = _CONFIDENCE_LINE.of(checkpoint), _CONFIDENCE_START.of(checkpoint)
    if not (line and start):
        return None
    threshold = _CONFIDENCE_THRESHOLD.of(checkpoint)
    return ConfidenceRule(Estimator(*line), Estimator(*start), threshold)


def opens_lines_of(checkpoint: DescribedModel) -> bool:
    """Return whether carets at line starts are answered as on an empty line; false by default.

    See ``planner.opened_line_break``.
    """
    return _OPENS_LINES.of(checkpoint)


def reuse_method_of(checkpoint: DescribedModel) -> str:
    """Return the method by which a model's infilling prompts take KV from elsewhere.

    ``REUSE_OFF`` by default: an answer is exact unless it was measured that it need not be.
    """
    return _REUSE.of(checkpoint)


def raw_bos_of(checkpoint: DescribedModel) -> int | None:
    """Return the token that begins raw prompts; None if there is none.

    That is the tokenizer's own unless the model's metadata names another one. A model that was
    trained on nothing but FIM prompts has never seen a text that no control token precedes, and
    goes on badly from one, whatever its tokenizer says of BOS.

    Raises:
        CheckpointError: the model has no such token.
    """
    tokenizer = checkpoint.tokenizer
    text = _RAW_BOS.of(checkpoint)
    if not text:
        return tokenizer.bos_token_id if tokenizer.add_bos else None
    if text not in tokenizer.special_tokens:
        raise CheckpointError(
            f"{checkpoint.path}: the model has no token {_short(text)}, with which raw prompts"
            " should begin ('raw_prompt.bos' in its or its adapter's midfill.json)"
        )
    return tokenizer.special_tokens[text]


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


def write_confidence(folder: Path, rule: ConfidenceRule, measured: Mapping[str, object]) -> Path:
    """Write how sure a model's answers are into a folder's midfill.json, see ``write_cut``."""
    section = {
        "line": [round(number, 4) for number in astuple(rule.line)],
        "start": [round(number, 4) for number in astuple(rule.start)],
        "threshold": rule.threshold,
        "measured": dict(measured),
    }
    keys = f"{CONFIDENCE_LINE_KEY}, {CONFIDENCE_START_KEY} and {CONFIDENCE_THRESHOLD_KEY}"
    return _write_section(folder, "confidence", section, keys)


def write_reuse(folder: Path, method: str, measured: Mapping[str, object]) -> Path:
    """Write how prompts take KV from elsewhere into a folder's midfill.json, see ``write_cut``."""
    section = {"method": method, "measured": dict(measured)}
    return _write_section(folder, "reuse", section, REUSE_KEY)


def _write_section(folder: Path, name: str, section: Mapping[str, object], keys: str) -> Path:
    check_folder(folder, keys)
    path = folder / RECORD_FILE
    record = {"format": RECORD_FORMAT, **read_json(path, optional=True), name: section}
    write_file(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return path
