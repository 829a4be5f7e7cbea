"""TrainingRecipe: every number that decides what a training run does."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from midfill.errors import MidfillError
from midfill.training.plain_values import build

Method = Literal["lora", "full"]
Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """How documents become examples.

    Attributes:
        suffixes: endings of the files read from folders.
        documents: most documents read; None reads all.
        windows: most examples cut out of one document.
        prefix_characters, suffix_characters: smallest and largest context on either side of a
            hole, drawn log-uniformly.
        long_share: share of examples with contexts up to ``long_characters`` on either side.
        long_characters: their limit.
        line, block, span: weights of the kinds of holes: from the caret to the end of its line,
            some whole lines, and any characters.
        block_lines: most lines of a block.
        whole_lines: share of blocks that begin and end at a line's start, line break included,
            half of them a single line; the others leave the first line's indent and the last
            line's break.
        span_characters: longest span.
        empty_suffix: share of examples whose hole reaches the end of the text.
        psm, spm, efim, planned: weights of the layouts: whole prefix before the suffix, whole
            prefix after MID, a cut anywhere between, and the planner's first cut.
        fragments: whether text is tokenised in fragments (EFIM, section on fragment
            tokenization).
        fragments_from: share of the run's tokens after which it is; before, text is whole.
        fragment_share: share of examples with further cuts beside the caret.
        fragment_cuts: most further cuts an example gets; their number is drawn log-uniformly.
        typed_share: share of examples whose text before the caret is cut as if it had been typed.
        typed_characters: how much of it.
        increment_weight: weight in the loss of the text between MID and the caret; the hole's own
            tokens have 1.
        end_weight: weight of the token that ends the answer.
    """

    suffixes: tuple[str, ...] = (".py",)
    documents: int | None = None
    windows: int = 2
    prefix_characters: tuple[int, int] = (40, 1100)
    suffix_characters: tuple[int, int] = (25, 600)
    long_share: float = 0.1
    long_characters: int = 3000
    line: float = 0.45
    block: float = 0.3
    span: float = 0.25
    block_lines: int = 8
    whole_lines: float = 0.6
    span_characters: int = 200
    empty_suffix: float = 0.04
    psm: float = 0.3
    spm: float = 0.1
    efim: float = 0.3
    planned: float = 0.3
    fragments: bool = True
    fragments_from: float = 0.0
    fragment_share: float = 0.6
    fragment_cuts: int = 8
    typed_share: float = 0.4
    typed_characters: int = 60
    increment_weight: float = 0.5
    end_weight: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges (MidfillError)."""
        _at_least(1, self, "documents", "windows", "block_lines", "span_characters")
        _at_least(1, self, "long_characters")
        _at_least(0, self, "fragment_cuts", "typed_characters", "increment_weight")
        _at_least(0, self, "end_weight")
        _ranges(self, "prefix_characters", "suffix_characters")
        _shares(self, "long_share", "empty_suffix", "fragments_from", "fragment_share")
        _shares(self, "typed_share", "whole_lines")
        _weights(self, "line", "block", "span")
        _weights(self, "psm", "spm", "efim", "planned")


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """A training run.

    Attributes:
        method: "lora" trains low-rank updates and the sentinels' rows, "full" every weight.
        rank, alpha: of LoRA; an update counts alpha / rank.
        tokens: how many are trained on.
        tokens_a_step: between two changes of the weights.
        row_tokens: longest packed row; longer examples are left out. Each thread has one row in
            memory at a time.
        learning_rate: peak.
        warmup, decay: shares of the run in which the rate rises from 0, and falls to 0.
        weight_decay, clip: of AdamW; largest norm of a gradient.
        grid_from: share of the run after which a quantised base is trained through the rounding
            that serving adds, see ``grid``; 1 leaves it out. Bases stored as floats have none.
        grid_steps: steps between two such roundings.
        precision: "auto" is bfloat16 where the device multiplies it natively, else float32.
        gradient_checkpointing: compute activations twice instead of keeping them.
        seed: of everything that is drawn.
        data: how documents become examples.
    """

    method: Method = "lora"
    rank: int = 32
    alpha: int = 64
    tokens: int = 1_500_000
    tokens_a_step: int = 2048
    row_tokens: int = 1024
    learning_rate: float = 8e-4
    warmup: float = 0.03
    decay: float = 0.35
    weight_decay: float = 0.0
    clip: float = 1.0
    grid_from: float = 0.4
    grid_steps: int = 4
    precision: Precision = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0
    data: DataRecipe = field(default_factory=DataRecipe)

    def __post_init__(self) -> None:
        """Check the ranges (MidfillError)."""
        _at_least(1, self, "rank", "alpha", "tokens", "tokens_a_step", "row_tokens")
        _at_least(1, self, "grid_steps")
        _at_least(0, self, "learning_rate", "weight_decay", "clip", "seed")
        _shares(self, "warmup", "decay", "grid_from")

    @property
    def steps(self) -> int:
        """Changes of the weights in the whole run."""
        return max(1, self.tokens // self.tokens_a_step)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: rises, stays, falls; each part linearly."""
        rising = max(1, round(self.warmup * self.steps))
        falling = max(1, round(self.decay * self.steps))
        return self.learning_rate * min(
            1.0, (step + 1) / rising, max(0.0, (self.steps - step) / falling)
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``from_dict`` takes them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingRecipe":
        """A recipe of plain values; what is left out has its default.

        Raises:
            MidfillError: an unknown name, or a value of the wrong kind or out of its range.
        """
        return build(cls, values)

    @classmethod
    def from_toml(cls, path: Path) -> "TrainingRecipe":
        """A recipe from a TOML file with the names above.

        Raises:
            MidfillError: the file is missing, is no TOML, or names something unknown.
        """
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise MidfillError(f"{path}: can't be read: {error.strerror or error}") from None
        except (ValueError, MidfillError) as error:  # wrong TOML or wrong UTF-8 is a ValueError
            raise MidfillError(f"{path}: {error}") from None


def _at_least(least: float, recipe: object, *names: str) -> None:
    for name in names:
        value = getattr(recipe, name)
        if value is not None and value < least:
            raise MidfillError(f"{name} must be at least {least}, not {value}")


def _shares(recipe: object, *names: str) -> None:
    for name in names:
        value = getattr(recipe, name)
        if not 0 <= value <= 1:
            raise MidfillError(f"{name} is a share, from 0 to 1, not {value}")


def _weights(recipe: object, *names: str) -> None:
    _at_least(0, recipe, *names)
    if not any(getattr(recipe, name) for name in names):
        raise MidfillError(f"one of {', '.join(names)} must be above 0")


def _ranges(recipe: object, *names: str) -> None:
    for name in names:
        low, high = getattr(recipe, name)
        if not 1 <= low <= high:
            raise MidfillError(f"{name} must be two numbers, the smaller first, not {low}, {high}")
