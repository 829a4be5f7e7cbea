"""KVShare: take the spans that a prompt shares with an earlier one, and repair them twice.

Yang et al., "KVShare: An LLM Service System with Efficient and Effective Multi-Tenant KV Cache
Reuse", 2025, arXiv 2503.16525. Of earlier prompts that share text with a new one, that is the donor
which most of its tokens can be taken from, by a search for common spans in any order (the paper's
differential edit). What was edited, F, is computed in all layers. Of the spans' tokens U, the share
``ratio`` is computed on above the check layer (stage 1), chosen by

    dev_j = sum over heads and channels of (V_new - V_old)^2
    att_j = attention that rows of F pay to token j, summed over heads

and only where dev_j exceeds ``eps`` of V_new's square. While the answer is written, others that it
attends to more than ``above`` times the mean are computed anew: at most ``refresh`` of them every
``period`` tokens (stage 2).

The paper doesn't give its score and stage 2 in full; these rules are ours. What differs: donors are
found by their tokens and not by an embedding of their text; spans that end with punctuation aren't
cut there, since the engine sees no text, but ``trim`` tokens at both ends are computed. Donors are
a tenant's own, and exact. The paper's scheduler is the queue order ``hit-rate``.
"""

from dataclasses import dataclass, replace

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int64Array
from midfill.kv.donor_index import CachedText, DonorSpan
from midfill.kv.token_runs import TokenRun, find_runs
from midfill.methods.reuse.attention import head_weights
from midfill.methods.reuse.method import (
    LayerKV,
    require_layer_above,
    require_least,
    require_one_of,
    require_shares,
)
from midfill.methods.reuse.sequence import BlendedSequence, Donors, ReuseKind
from midfill.methods.sequence_method import Admitted, RequestFacts, SequenceMethod, SequenceView
from midfill.methods.served_model import ServedModel

NAME = "kvshare"
_SCORES = ("both", "deviation", "attention")
_ANCHOR = 8  # tokens that a donor shares at least in a row
_BLOCK = 256  # rows whose attention is computed at a time


@dataclass(frozen=True)
class KVShare:
    """Implements ``methods.reuse.sequence.OwnSequences``.

    Attributes:
        ratio: rho, share of the copied tokens that is repaired in prefill, rounded down.
        check_layer: the layer in which values are compared, from 0.
        score: "deviation", "attention" or "both", their product.
        eps: tokens whose value deviates by less, as a share of its square, are not repaired.
        min_run: w, the least number of consecutive tokens that are copied.
        trim: tokens at both ends of each span that are computed.
        share: a donor is used if so much of what is not cached can be taken from it.
        donors: earlier prompts that are compared.
        refresh: q, rows that are repaired at a time while the answer is written; 0: none.
        period: P, tokens of the answer from one such repair to the next.
        above: c, of rows that are repaired then: their attention, as a multiple of the mean.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    ratio: float = 0.15
    check_layer: int = 1
    score: str = "both"
    eps: float = 0.01
    min_run: int = 5
    trim: int = 0
    share: float = 0.3
    donors: int = 5
    refresh: int = 4
    period: int = 8
    above: float = 4.0

    def __post_init__(self) -> None:
        require_shares(self, NAME, "ratio", "share")
        require_least(0, self, NAME, "eps", "above", "check_layer", "trim", "refresh")
        require_least(1, self, NAME, "min_run", "donors", "period")
        require_one_of(_SCORES, self, NAME, "score")

    def for_model(self, model: ServedModel) -> "KVShare":
        """Return the method; see ``require_layer_above`` for errors."""
        require_layer_above(self.check_layer, model, NAME)
        return self

    def attach(self, name: str, request: RequestFacts, shared: ReuseKind) -> BlendedSequence | None:
        """See ``OwnSequences.attach``: answers that share a prompt's KV don't repair it further."""
        alone = self if request.answers == 1 else replace(self, refresh=0)
        return SharedSequence(name, alone, shared)

    def repaired(
        self, deviation: Float64Array, size: Float64Array, attention: Float64Array
    ) -> Int64Array:
        """Return which of the copied tokens are computed above the check layer, too.

        Args:
            deviation: [n], dev.
            size: [n], the square of what the values are here.
            attention: [n], att.

        Returns:
            [m] int64, ascending; of equal scores the first.
        """
        scores = self.scores(deviation, attention)
        scores = np.where(deviation >= self.eps * size, scores, -1.0)
        ranked = np.argsort(-scores, kind="stable")[: int(self.ratio * len(scores))]
        chosen: Int64Array = np.sort(ranked[scores[ranked] >= 0.0])
        return chosen

    def scores(self, deviation: Float64Array, attention: Float64Array) -> Float64Array:
        """Return what tokens are ranked by: [n]."""
        if self.score == "both":
            return deviation * attention
        return deviation if self.score == "deviation" else attention


class SharedSequence(BlendedSequence):
    """KVShare at work on one sequence."""

    def __init__(self, name: str, method: KVShare, shared: ReuseKind) -> None:
        super().__init__(name, method, shared)
        self._share = method
        self._edited: list[tuple[Int64Array, Float32Array]] = []
        self._stale: Int64Array = np.zeros(0, np.int64)
        self._received: Float64Array = np.zeros(0)
        self._watched = 0
        self._fresh: Float32Array | None = None
        self._extra = 0

    @property
    def check_layer(self) -> int:
        """See ``BlendedSequence``."""
        return self._share.check_layer

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        super().restart()
        self._edited, self._fresh = [], None
        self._stale = np.zeros(0, np.int64)

    def fork(self) -> SequenceMethod:
        """See ``SequenceMethod``."""
        return SharedSequence(self.name, self._share, self.shared)

    def admitted(self, sequence: SequenceView) -> Admitted:
        """See ``SequenceMethod``: KV that is repaired while the answer is written is the answer's
        own, and not cached."""
        admitted = super().admitted(sequence)
        if self.blends and self._share.refresh:
            assert sequence.kv is not None
            sequence.kv.is_private = True
        return admitted

    # --- donors

    def find_donors(self, sequence: SequenceView, first: int, last: int) -> Donors | None:
        """See ``BlendedSequence``: take the text that most tokens can be copied from."""
        method, tokens = self._share, sequence.tokens[:last]
        best: tuple[int, list[TokenRun], CachedText] | None = None
        for text in self._candidates(sequence, first, last):
            runs = _trimmed(find_runs(tokens, first, [text.tokens], method.min_run), method.trim)
            matched = sum(run.length for run in runs)
            if best is None or matched > best[0]:
                best = matched, runs, text
        if best is None or not best[0] or best[0] < method.share * (last - first):
            return None
        matched, runs, text = best
        spans = [
            DonorSpan(run.start, run.source_start, text.slots[run.source_start :][: run.length])
            for run in runs
        ]
        return Donors(spans, matched - int(method.ratio * matched), last)

    def _candidates(self, sequence: SequenceView, first: int, last: int) -> list[CachedText]:
        """Return the texts that share the longest spans with a prompt, each once."""
        index = self.shared.donors
        least = max(self._share.min_run, _ANCHOR)
        spans = index.find(sequence.tenant, sequence.tokens[:last], first, least)
        texts: dict[int, CachedText] = {}
        for span in sorted(spans, key=lambda span: -span.length):
            text = index.text_through(int(span.slots[-1]))
            texts.setdefault(int(text.slots[-1]), text)
            if len(texts) == self._share.donors:
                break
        return list(texts.values())

    # --- the first repair

    def observed_layers(self, first: int, end: int) -> range:
        """See ``BlendedSequence``: the check layer's, where all rows run."""
        return range(self.check_layer, end) if first == 0 and self.blends else range(0)

    def observe_rows(
        self, sequence: SequenceView, rows: Int64Array, layer: int, queries: Float32Array
    ) -> None:
        """See ``BlendedSequence``: keep the queries of rows that have no copy."""
        edited = ~np.isin(rows, self.copied)
        self._edited.append((rows[edited], queries[edited]))

    def choose(
        self, sequence: SequenceView, numbers: Int64Array, copied: LayerKV, computed: LayerKV
    ) -> Int64Array:
        """See ``BlendedSequence``."""
        old, new = copied.values.astype(np.float64), computed.values.astype(np.float64)
        deviation, size = np.square(new - old).sum(axis=(1, 2)), np.square(new).sum(axis=(1, 2))
        attention = self._attention(sequence, numbers)
        chosen = self._share.repaired(deviation, size, attention)
        off = deviation >= self._share.eps * size
        off[chosen] = False
        self._stale = numbers[off] if self._share.refresh else numbers[:0]
        self._received, self._watched = np.zeros(len(self._stale)), 0
        return chosen

    def _attention(self, sequence: SequenceView, numbers: Int64Array) -> Float64Array:
        """Return the attention that edited rows pay to some tokens in the check layer: [n]."""
        assert sequence.kv is not None
        rows = np.concatenate([rows for rows, _ in self._edited])
        queries = np.concatenate([queries for _, queries in self._edited])
        self._edited = []
        received = np.zeros(len(numbers))
        if not len(rows):
            return received
        keys = self.read_keys(sequence.kv.slots[: int(rows[-1]) + 1], self.check_layer)
        for start in range(0, len(rows), _BLOCK):  # blocks of their own, whatever the steps were
            part = slice(start, start + _BLOCK)
            seen = int(rows[part][-1]) + 1
            weights = head_weights(
                self.shared.runner.config, self.check_layer, queries[part], keys[:seen], rows[part]
            )
            inside = numbers < seen
            received[inside] += weights[:, numbers[inside]].sum(axis=0, dtype=np.float64)
        return received

    # --- the second repair

    def allows_draft(self, tokens: int) -> bool:
        """See ``SequenceMethod``: every token of an answer that is watched takes a step."""
        return not len(self._stale) and super().allows_draft(tokens)

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        """See ``SequenceMethod``: the answer's, as long as there is something to repair."""
        watches = len(self._stale) and sequence.computed >= sequence.prompt_length
        return range(tokens if watches else 0)

    def observe(self, first: int, queries: Float32Array) -> None:
        """See ``SequenceMethod``."""
        self._fresh = queries

    def committed(self, sequence: SequenceView) -> int:
        """See ``SequenceMethod``: add up what the answer's last token attends to."""
        queries, self._fresh = self._fresh, None
        if queries is None or not len(self._stale):
            return sequence.computed
        assert sequence.kv is not None
        layers = sorted({self.check_layer, self.shared.runner.config.layers // 2})
        rows = np.arange(sequence.computed - queries.shape[1], sequence.computed)
        for layer in layers:
            keys = self.read_keys(sequence.kv.slots[: sequence.computed], layer)
            weights = head_weights(self.shared.runner.config, layer, queries[layer], keys, rows)
            self._received += weights[:, self._stale].sum(axis=0, dtype=np.float64) / len(layers)
        self._watched += len(rows)
        return sequence.computed

    def decide(self, sequence: SequenceView) -> bool:
        """See ``SequenceMethod``: compute rows anew that the answer attends to."""
        method = self._share
        if not len(self._stale) or self._watched < method.period:
            return True
        mean = self._received / self._watched
        ranked = np.argsort(-mean, kind="stable")[: method.refresh]
        chosen = np.sort(ranked[mean[ranked] > method.above / sequence.computed])
        if len(chosen):
            layers = self.shared.runner.config.layers
            self.run_rows(sequence, self._stale[chosen], None, 0, layers)
            self._extra += len(chosen)
            self._stale = np.delete(self._stale, chosen)
        self._received, self._watched = np.zeros(len(self._stale)), 0
        return True

    def take_extra_rows(self) -> int:
        """See ``SequenceMethod``."""
        extra, self._extra = self._extra, 0
        return extra


def _trimmed(runs: list[TokenRun], trim: int) -> list[TokenRun]:
    """Return runs without some tokens at both ends; those that are too short are left out."""
    return [
        TokenRun(run.start + trim, run.length - 2 * trim, run.source, run.source_start + trim)
        for run in runs
        if run.length > 2 * trim
    ]
