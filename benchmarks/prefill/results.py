"""What a run of ``bench prefill`` measures, and what it found."""

import msgspec

from midfill.system.machine import Machine

DENSE = "none"
"""Specification of dense attention, beside which everything is measured."""


class PrefillOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        tokens: of each prompt, or as many as the context has room for.
        depths: where a needle is, one prompt each.
        scored: tokens at a prompt's end whose distributions are compared.
        repeats: runs of everything that is timed; figures are medians.
        threads: that the model runs on.
        seed: of all random choices.
    """

    tokens: int = 8000
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    scored: int = 64
    repeats: int = 3
    threads: int = 1
    seed: int = 0


QUICK = PrefillOptions(tokens=4000, depths=(0.2, 0.8), repeats=1)


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """One variant.

    Attributes:
        name: as it is shown.
        seconds: processor time of a prefill, in each repeat.
        rest_seconds: of one whose rows attend to their own block only, moments before.
        dense_seconds: of a dense one, moments before.
        pairs: products of queries and keys in listed chunks, per layer and query head.
        causal: products of dense attention in these chunks, per layer and head.
        logprob: mean log-probability of the needles' tokens, in nats.
        likeliest: share of the needles that a greedy answer would be.
        divergence: mean Kullback-Leibler divergence from dense attention, in nats per token.
    """

    name: str
    seconds: list[float] = []
    rest_seconds: list[float] = []
    dense_seconds: list[float] = []
    pairs: list[list[int]] = []
    causal: int = 0
    logprob: float = 0.0
    likeliest: float = 0.0
    divergence: float = 0.0


class PrefillReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        load: processes that ran or waited for a core in the minute before the run, on average.
        model, backend, text: what ran, and where its text comes from.
        tokens: of the prompts.
        results: dense attention first.
    """

    machine: Machine
    load: float
    options: PrefillOptions
    model: str
    backend: str
    text: str
    tokens: int
    results: list[PrefillResult]
