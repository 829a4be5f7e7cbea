"""The figures of ``bench reuse``."""

import msgspec

from midfill.system.machine import Machine

FULL = "none"
"""Specification under which everything is computed that is no exact prefix."""
FILES = "files"
"""The kind of prompts that show files."""


class ReuseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        methods: specifications, beside ``FULL``.
        windows: of jumps, characters before and after the caret, as "2000/600".
        jumps: how many per window.
        contexts: prompts with files that were shown before, in another order; as many keystrokes
            are typed in each of two layouts, with the first window.
        files: least and most files of each.
        file_tokens: least and most tokens of a file.
        seed: all chance follows from it.
    """

    methods: list[str]
    windows: list[str]
    jumps: int = 60
    contexts: int = 12
    files: tuple[int, int] = (3, 6)
    file_tokens: tuple[int, int] = (500, 1500)
    seed: int = 0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one prompt took under one method, and what came of it.

    Attributes:
        ttft_seconds: until the logits of the first token were there.
        row_layers: rows times layers that were computed until then.
        key_pairs: pairs of a row and a key that it attends to, in all layers together.
        reused_tokens: prompt tokens whose KV came from elsewhere.
        divergence: KL of the first token's distribution from that under ``FULL``, in nats.
        answer: its first line.
        exact: whether that is the text that was there.
    """

    ttft_seconds: float
    row_layers: int
    key_pairs: int
    reused_tokens: int
    divergence: float
    answer: str
    exact: bool


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt under every method.

    Attributes:
        kind: "jump 2000/600", "files", "typing, PSM" or "typing, planner".
        name: of the place in its file.
        tokens: of the prompt.
        cached: how many of them are an exact prefix in the cache.
        asked: by specification.
    """

    kind: str
    name: str
    tokens: int
    cached: int
    asked: dict[str, Asked]


class ReuseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        layers: of the model.
        load: other work on the machine when it began (the system's load average).
        text: where the files come from.
    """

    model: str
    backend: str
    layers: int
    machine: Machine
    load: float
    text: str
    options: ReuseOptions
    trials: list[Trial]
