"""A run: dense attention, methods and baselines on the same prompts.

Processor time is measured, not time on the wall, so a run beside other work means something. A
prefill's attention is what it takes beyond one whose rows attend to their own block of 64 keys
only; choosing keys is part of it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch

from benchmarks.prefill.baselines import AShape, OwnBlock, RandomCross, of_equal_cost
from benchmarks.prefill.results import DENSE, PrefillOptions, PrefillReport, PrefillResult
from midfill.lab.bench.methods.haystacks import Haystacks
from midfill.lab.bench.methods.needles import needle_probes
from midfill.lab.bench.methods.probes import Probe
from midfill.lab.bench.methods.session import MethodSession
from midfill.methods.sparse_prefill.chunks import ChunkRule
from midfill.methods.sparse_prefill.method import PrefillMethod
from midfill.system.machine import describe_machine

_REST = "own block"
_BASELINES = (("A-shape", AShape), ("random", RandomCross))
_ANSWER_ROOM = 64


def measure_prefill(
    model: str,
    methods: Sequence[str],
    options: PrefillOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> PrefillReport:
    """Measure methods of sparse prefill.

    Args:
        model: name or path.
        methods: their specifications.
        options: what is measured.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be loaded, or a method can't be used with it.
    """
    load = os.getloadavg()[0]
    progress(f"loading {model}")
    extra: dict[str, PrefillMethod] = {_REST: OwnBlock(ChunkRule(1024, 0))}
    session = MethodSession(model, options.threads, extra)
    try:
        haystacks = Haystacks(session.encode, options.seed)
        tokens = min(options.tokens, session.info.context - _ANSWER_ROOM)
        drawn = needle_probes(
            session.tokenizer, haystacks, tokens=tokens - _ANSWER_ROOM, depths=options.depths,
            repeats=1, seed=options.seed,
        )  # fmt: skip
        probes = [probe for probe in drawn if probe.task == "needle"]
        names = {DENSE: "dense", **{method: method for method in methods}}
        run = _Run(session, options, probes, progress)
        counts = {name: run.pairs(name) for name in names}
        for method in methods:
            for title, make in _BASELINES:
                name = f"{title} beside {method}"
                names[name] = name
                found = session.find_method(method)
                assert isinstance(found, PrefillMethod)
                extra[name] = _of_equal_cost(make, found, counts[method][0], len(probes[0].tokens))
                counts[name] = run.pairs(name)
        quality = run.quality(list(names))
        seconds = run.times([DENSE, *methods])
        results = [
            _result(name, title, seconds, counts[name], quality[name])
            for name, title in names.items()
        ]
        return PrefillReport(
            machine=describe_machine(), load=load, options=options, model=model,
            backend=session.info.backend, text=haystacks.source, tokens=len(probes[0].tokens),
            results=results,
        )  # fmt: skip
    finally:
        session.close()


def _result(
    name: str,
    title: str,
    seconds: Sequence[Mapping[str, float]],
    counts: tuple[list[list[int]], int],
    quality: tuple[float, float, float],
) -> PrefillResult:
    """Return what was measured of one method.

    Args:
        name: its specification.
        title: what it is called.
        seconds: of prefills with all methods, in each repeat.
        counts: its products by layer and head, and those of dense attention.
        quality: log-probability and greedy share of needles, and divergence from dense.
    """
    logprob, likeliest, divergence = quality
    return PrefillResult(
        name=title,
        seconds=[taken[name] for taken in seconds if name in taken],
        rest_seconds=[taken[_REST] for taken in seconds],
        dense_seconds=[taken[DENSE] for taken in seconds],
        pairs=counts[0],
        causal=counts[1],
        logprob=logprob,
        likeliest=likeliest,
        divergence=divergence,
    )


def _of_equal_cost(
    make: Callable[[ChunkRule, float], AShape],
    method: PrefillMethod,
    pairs: Sequence[Sequence[int]],
    tokens: int,
) -> PrefillMethod:
    """Return a baseline that takes as many products of queries and keys as a method.

    Args:
        make: the baseline's kind.
        method: the method.
        pairs: its products, by layer and head.
        tokens: of a prompt.
    """
    rule = ChunkRule(method.chunk_tokens, _dense_until(method))
    heads = sum(map(len, pairs)) or 1
    return of_equal_cost(make, rule, tokens, sum(map(sum, pairs)) / heads)


def _dense_until(method: PrefillMethod) -> int:
    """Return up to which number of keys a method's chunks are dense."""
    size = method.chunk_tokens
    first = 0
    while method.is_dense(first, size):
        first += size
    return first


class _Run:
    """Measurements of one loaded model."""

    def __init__(
        self,
        session: MethodSession,
        options: PrefillOptions,
        probes: Sequence[Probe],
        progress: Callable[[str], None],
    ) -> None:
        self._session = session
        self._options = options
        self._probes = probes
        self._progress = progress

    def pairs(self, name: str) -> tuple[list[list[int]], int]:
        """Return the products of a prefill of the first prompt, by layer and head, and dense ones.

        Layers that no method is asked about are left out.
        """
        self._progress(f"counting: {name}")
        counts = self._session.key_pairs
        before, causal = counts.computed.copy(), counts.causal.copy()
        self._session.hold(self._probes[0].tokens, name, 2, cold=True)
        listed = counts.causal > causal
        if not listed.any():
            return [], 0
        return (counts.computed - before)[listed].tolist(), int((counts.causal - causal).max())

    def quality(self, names: Sequence[str]) -> dict[str, tuple[float, float, float]]:
        """Return log-probability and greedy share of needles, and divergence from dense."""
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for number, probe in enumerate(self._probes, 1):
            dense = self._distributions(probe, DENSE)
            for name in names:
                self._progress(f"prompt {number} of {len(self._probes)}: {name}")
                own = dense if name == DENSE else self._distributions(probe, name)
                divergence = (dense.exp() * (dense - own)).sum(dim=-1).mean()
                start, end = probe.answers[0]
                answer = torch.tensor(probe.tokens[start:end])
                rows = own[start - end :]
                logprob = rows.gather(1, answer[:, None]).mean()
                likeliest = (rows.argmax(dim=-1) == answer).all()
                found[name].append((float(logprob), float(likeliest), float(divergence)))
        return {name: _means(one) for name, one in found.items()}

    def times(self, names: Sequence[str]) -> list[dict[str, float]]:
        """Return the processor seconds of prefills, one after the other, in each repeat."""
        taken = []
        for repeat in range(self._options.repeats):
            one = {}
            for name in (_REST, *names):
                self._progress(f"repeat {repeat + 1} of {self._options.repeats}: {name}")
                one[name] = self._session.prefill_seconds(self._probes[0].tokens, name)
            taken.append(one)
        return taken

    def _distributions(self, probe: Probe, name: str) -> torch.Tensor:
        first = probe.answers[0][0] - self._options.scored
        return self._session.log_likelihoods(probe.tokens, name, probe.compress_after, first)


def _means(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    logprob, likeliest, divergence = (fmean(column) for column in zip(*rows, strict=True))
    return logprob, likeliest, divergence
