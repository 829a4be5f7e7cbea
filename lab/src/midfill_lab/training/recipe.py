"""TrainingRecipe: every setting that decides what a training run does."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from midfill.errors import MidfillError

Method = Literal["lora", "full"]
Precision = Literal["auto", "fp32", "bf16"]
AdapterPrecision = Literal["bf16", "fp8"]
LoraModules = Literal["all-linear", "attention"]

RENAMED_SETTINGS: Mapping[str, str] = {
    "tokens_a_step": "tokens_per_step",
    "grid_from": "qat_start",
    "grid_steps": "qat_interval",
}
"""Old names of settings and their names today; the old ones are accepted for one release."""

STEP_FILL = 0.9
"""Share of a step's tokens with which it is full: whole rows rarely add up to all of them."""

_Built = TypeVar("_Built")
_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """How documents become examples.

    Attributes:
        suffixes: suffixes of the files read from folders.
        suffix_shares: weight of each suffix among the documents, as long as there are documents of
            all; empty for as many as there are files.
        documents: maximum number of documents per pass; None reads all.
        workers: processes that make the examples, each of every so many-th document; 0 makes them
            between two steps. Duplicates are found within a process's share.
        windows: maximum number of examples per document and pass.
        prefix_characters, suffix_characters: minimum and maximum length of the context on either
            side of a hole, drawn log-uniformly.
        long_share: share of examples with contexts of up to ``long_characters`` on either side.
        long_characters: maximum length of these.
        line, block, span, nothing: weights of the kinds of holes: from the caret to the end of its
            line, some lines, any characters, and carets where nothing is missing.
        block_lines: maximum number of lines of a block.
        whole_lines: share of blocks that start and end at the start of a line, line break
            included; half of them are single lines. The other blocks leave out the first line's
            indentation and the last line's break.
        opened_lines: whether carets at the start of a line that has text are shown as the server
            shows them: on an empty line above it (``infill.planner``). Holes of whole lines
            then leave out their last line break.
        span_characters: maximum length of a span.
        empty_suffix: share of examples without text after the hole.
        psm, spm, efim, planned: weights of the layouts: the suffix after the whole prefix, before
            it, at a random character of it, and where the planner puts it at first.
        increment_characters: minimum and maximum of the least increment that the planner's rule is
            given, drawn log-uniformly. Increments grow beyond it as an editing session goes on.
        fragments: whether text is tokenised in fragments (EFIM's fragment tokenization).
        fragments_from: share of the run's tokens before which text is still tokenised whole.
        caret_share: share of examples with a cut at the caret. The others are what token healing
            sends: the model writes the token across the caret.
        fragment_share: share of texts that are also cut elsewhere than at the caret.
        fragment_cuts: maximum number of these cuts, drawn log-uniformly.
        typed_share: share of examples whose text before the caret is cut as if typed.
        typed_characters: length of the text that is cut so.
        context_weight: loss weight of the prompt's text, before MID; 0 trains on what follows.
        increment_weight: loss weight of the tokens between MID and the caret; tokens of the hole
            have weight 1.
        end_weight: loss weight of the token that ends the answer.
        unfinished_lines: maximum number of line ends per increment at which the model learns, with
            weight 1, that the answer does not end there.
    """

    suffixes: tuple[str, ...] = (".py",)
    suffix_shares: tuple[float, ...] = ()
    documents: int | None = None
    workers: int = 0
    windows: int = 2
    prefix_characters: tuple[int, int] = (40, 1100)
    suffix_characters: tuple[int, int] = (25, 600)
    long_share: float = 0.1
    long_characters: int = 3000
    line: float = 0.45
    block: float = 0.3
    span: float = 0.25
    nothing: float = 0.0
    block_lines: int = 8
    whole_lines: float = 0.6
    opened_lines: bool = False
    span_characters: int = 200
    empty_suffix: float = 0.04
    psm: float = 0.3
    spm: float = 0.1
    efim: float = 0.3
    planned: float = 0.3
    increment_characters: tuple[int, int] = (400, 800)
    fragments: bool = True
    fragments_from: float = 0.0
    caret_share: float = 1.0
    fragment_share: float = 0.6
    fragment_cuts: int = 8
    typed_share: float = 0.4
    typed_characters: int = 60
    context_weight: float = 0.0
    increment_weight: float = 0.5
    end_weight: float = 1.0
    unfinished_lines: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            MidfillError: a value is out of its range.
        """
        _check_minimum(1, self, "documents", "windows", "block_lines", "span_characters")
        _check_minimum(1, self, "long_characters")
        _check_minimum(0, self, "workers", "fragment_cuts", "typed_characters", "increment_weight")
        _check_minimum(0, self, "context_weight", "end_weight", "unfinished_lines")
        _check_ranges(self, "prefix_characters", "suffix_characters", "increment_characters")
        _check_shares(self, "long_share", "empty_suffix", "fragments_from", "fragment_share")
        _check_shares(self, "typed_share", "whole_lines", "caret_share")
        _check_weights(self, "line", "block", "span")
        _check_minimum(0, self, "nothing")
        _check_weights(self, "psm", "spm", "efim", "planned")
        shares = self.suffix_shares
        if shares and (len(shares) != len(self.suffixes) or min(shares) <= 0):
            raise MidfillError(
                f"suffix_shares must have a number above 0 for each of {', '.join(self.suffixes)},"
                f" not {list(shares)}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The settings of a training run.

    Attributes:
        method: "lora" trains low-rank updates and the sentinels' embedding rows, "full" trains
            every weight.
        rank, alpha: of LoRA; updates are scaled by alpha / rank.
        lora_modules: the matrices that LoRA updates: all of a layer, or those of its attention.
        adapter_precision: how the adapter is stored; "fp8" takes half the space.
        distillation: loss weight of the divergence from the base, which keeps what it knew, see
            ``loss``; 0 turns it off.
        tokens: number of tokens to train on.
        tokens_per_step: tokens per optimizer step.
        row_tokens: maximum length of a packed row; longer examples are dropped. Each thread holds
            the activations of one row at a time.
        learning_rate: its peak.
        warmup, decay: shares of the run in which the learning rate rises from 0 and falls to 0.
        weight_decay: of AdamW.
        clip: maximum gradient norm.
        qat_start: share of the run after which a quantised base is trained quantization-aware,
            see ``lora``; 1 turns this off. Without effect on a base of floats.
        qat_interval: steps between two requantisations.
        precision: "auto" is bfloat16 where the device multiplies it natively, else float32.
        gradient_checkpointing: compute activations twice instead of storing them.
        seed: seed of all randomness.
        data: how documents become examples.
    """

    method: Method = "lora"
    rank: int = 32
    alpha: int = 64
    lora_modules: LoraModules = "all-linear"
    adapter_precision: AdapterPrecision = "bf16"
    distillation: float = 0.0
    tokens: int = 1_500_000
    tokens_per_step: int = 2048
    row_tokens: int = 1024
    learning_rate: float = 8e-4
    warmup: float = 0.03
    decay: float = 0.35
    weight_decay: float = 0.0
    clip: float = 1.0
    qat_start: float = 0.4
    qat_interval: int = 4
    precision: Precision = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0
    data: DataRecipe = field(default_factory=DataRecipe)

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            MidfillError: a value is out of its range.
        """
        _check_minimum(1, self, "rank", "alpha", "tokens", "tokens_per_step", "row_tokens")
        _check_minimum(1, self, "qat_interval")
        _check_minimum(0, self, "learning_rate", "weight_decay", "clip", "seed")
        _check_minimum(0, self, "distillation")
        _check_shares(self, "warmup", "decay", "qat_start")

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return max(1, self.tokens // self.tokens_per_step)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step: linear warmup, constant, linear decay."""
        warmup = max(1, round(self.warmup * self.steps))
        decay = max(1, round(self.decay * self.steps))
        return self.learning_rate * min(
            1.0, (step + 1) / warmup, max(0.0, (self.steps - step) / decay)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, as ``from_dict`` takes them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingRecipe":
        """Make a recipe from plain values; missing settings have their defaults.

        Raises:
            MidfillError: an unknown name, or a value of the wrong type or out of its range.
        """
        return build(cls, with_current_names(values))

    @classmethod
    def from_toml(cls, path: Path) -> "TrainingRecipe":
        """Read a recipe from a TOML file.

        Raises:
            MidfillError: the file is missing, not TOML, or not a recipe.
        """
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise MidfillError(f"{path}: can't be read: {error.strerror or error}") from None
        except (ValueError, MidfillError) as error:  # bad TOML and bad UTF-8 are ValueErrors
            raise MidfillError(f"{path}: {error}") from None


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with old names replaced by today's, see ``RENAMED_SETTINGS``.

    Raises:
        MidfillError: a setting is given by both its names.
    """
    for old, new in RENAMED_SETTINGS.items():
        if old in settings and new in settings:
            raise MidfillError(f"{old} is the old name of {new}; set {new} alone")
    return {RENAMED_SETTINGS.get(name, name): value for name, value in settings.items()}


def build(kind: type[_Built], values: object, path: str = "") -> _Built:
    """Make a dataclass from values as TOML and JSON hold them, checking each one's type.

    Args:
        kind: a dataclass whose fields all have defaults and are numbers, strings, booleans,
            Literals, tuples of these, such dataclasses, or None beside one of these.
        values: a mapping from names to values; missing ones have their defaults.
        path: prefix of names in error messages.

    Raises:
        MidfillError: an unknown name or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        name = path.removesuffix(".") or "the recipe"
        raise MidfillError(f"{name} must be a table of names and values, not {values!r}")
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise MidfillError(f"unknown name {path}{name}; known: {', '.join(hints)}")
    return kind(
        **{
            name: _checked_value(f"{path}{name}", value, hints[name])
            for name, value in values.items()
        }
    )


def _checked_value(name: str, value: object, hint: Any) -> object:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, f"{name}.")
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise MidfillError(f"{name} must be one of {', '.join(arguments)}, not {value!r}")
        return value
    if origin is UnionType:
        (inner,) = (each for each in arguments if each is not type(None))
        return None if value is None else _checked_value(name, value, inner)
    if origin is tuple:
        return _checked_tuple(name, value, arguments)
    if hint is float and type(value) is int:
        value = float(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    if type(value) is not hint or not finite:
        raise MidfillError(f"{name} must be {_KINDS[hint]}, not {value!r}")
    return value


def _checked_tuple(name: str, value: object, arguments: tuple[Any, ...]) -> tuple[object, ...]:
    any_length = arguments[-1] is Ellipsis
    if not isinstance(value, list | tuple) or (not any_length and len(value) != len(arguments)):
        count = "" if any_length else f" of {len(arguments)}"
        raise MidfillError(f"{name} must be a list{count}, not {value!r}")
    return tuple(_checked_value(name, each, arguments[0]) for each in value)


def _check_minimum(minimum: float, recipe: object, *names: str) -> None:
    for name in names:
        value = getattr(recipe, name)
        if value is not None and value < minimum:
            raise MidfillError(f"{name} must be at least {minimum}, not {value}")


def _check_shares(recipe: object, *names: str) -> None:
    for name in names:
        value = getattr(recipe, name)
        if not 0 <= value <= 1:
            raise MidfillError(f"{name} is a share, from 0 to 1, not {value}")


def _check_weights(recipe: object, *names: str) -> None:
    _check_minimum(0, recipe, *names)
    if not any(getattr(recipe, name) for name in names):
        raise MidfillError(f"one of {', '.join(names)} must be above 0")


def _check_ranges(recipe: object, *names: str) -> None:
    for name in names:
        low, high = getattr(recipe, name)
        if not 1 <= low <= high:
            raise MidfillError(f"{name} must be two numbers, the smaller first, not {low}, {high}")
