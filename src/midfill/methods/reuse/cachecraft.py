"""Cache-Craft: decide by attention statistics kept with each chunk how much of it is recomputed.

Agarwal et al., "Cache-Craft: Managing Chunk-Caches for Efficient Retrieval-Augmented Generation",
SIGMOD 2025, arXiv 2502.15734, sections 3 and 4. Chunks are the files that a prompt shows; what
comes before them is a chunk of the prefix. Where a chunk is computed, the attention that its tokens
pay is kept, averaged over query heads and summed over blocks: inter(i, j) to each chunk before it,
intra(i) to itself, and of each token u, to all chunks before. From these:

    CCI  = 1 / (1 + exp(-a / b))    a = sum_j inter(i, j) / (|C_i| |C_j|),  b = intra(i) / |C_i|^2
    beta = sum of inter(i, j) over chunks that the new prefix has, too / sum over all
    beta' = beta (1 - gamma)        gamma: share of the common chunks' pairs whose order differs
    CFO  = alpha CCI (1 - beta'), at most 1

Of a chunk behind another prefix, the share CFO of its tokens with the largest u is computed in all
layers, the others keep the KV that they have elsewhere. Of several places where a chunk is cached,
its variants, that with the least CFO is taken.

What differs: attention is observed in every ``every``-th layer, since it is computed once more for
that, beside the kernels. What a variant's KV is worth decides how long its statistics are kept; the
KV itself is the prefix cache's, and each use counts as one there. Statistics of KV that is evicted
are forgotten. Repair doesn't end early for chunks that the question ignores, and nothing is loaded
layer by layer, since KV is in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from midfill.arrays import Float32Array, Int32Array, Int64Array
from midfill.kv.donor_index import DonorIndex, DonorSpan
from midfill.methods.budget import require
from midfill.methods.reuse.attention import block_sums, head_weights
from midfill.methods.reuse.method import require_least
from midfill.methods.reuse.sequence import BlendedSequence, Donors, ReuseKind
from midfill.methods.sequence_method import Admitted, RequestFacts, SequenceMethod, SequenceView

NAME = "cachecraft"
_LEAST_OVERHEAD = 0.05  # so that a variant that needs no repair isn't worth infinitely much


@dataclass(frozen=True)
class CacheCraft:
    """Implements ``methods.reuse.sequence.OwnSequences``.

    Attributes:
        alpha: scales the share of tokens that are computed again; 0: none are.
        every: attention is observed in every so many layers, from the first one on.
        chunks: how many chunks have statistics.
        variants: how many variants of a chunk have.
        decay: what the worth of a variant is multiplied by at each look-up of another one.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    alpha: float = 1.0
    every: int = 4
    chunks: int = 100
    variants: int = 5
    decay: float = 0.99

    def __post_init__(self) -> None:
        require_least(0, self, NAME, "alpha")
        require_least(1, self, NAME, "every", "chunks", "variants")
        require(
            0.0 < self.decay <= 1.0, f"decay must be above 0 and at most 1, not {self.decay:g}",
            NAME,
        )  # fmt: skip

    def attach(self, name: str, request: RequestFacts, shared: ReuseKind) -> BlendedSequence | None:
        """See ``OwnSequences.attach``: prompts without files are served as ever."""
        bounds = tuple(sorted({max(bound, 1) for bound in request.contexts}))
        if len(bounds) < 2 or bounds[-1] >= request.prompt:
            return None
        return ChunkedSequence(name, self, shared, bounds)

    @property
    def statistics(self) -> "CacheCraft":
        """What its statistics depend on: methods of which this is the same share them."""
        return CacheCraft(1.0, self.every, self.chunks, self.variants, self.decay)

    def repaired(self, scores: Float32Array, overhead: float) -> Int64Array:
        """Return which tokens of a chunk are computed again: [n] int64, ascending.

        Args:
            scores: [tokens] float32, each token's attention to what came before the chunk.
            overhead: which share of them, rounded up.
        """
        count = int(np.ceil(overhead * len(scores)))
        chosen: Int64Array = np.sort(np.argsort(-scores, kind="stable")[:count])
        return chosen


def context_impact(inter: Sequence[float], sizes: Sequence[int], intra: float, size: int) -> float:
    """Return CCI: how much a chunk of ``size`` tokens is made of what came before it.

    Args:
        inter: its attention to each chunk before.
        sizes: their tokens.
        intra: its attention to itself.
        size: its tokens.
    """
    external = sum(each / (size * other) for each, other in zip(inter, sizes, strict=True))
    internal = intra / size**2
    if internal == 0.0:
        return 1.0 if external > 0.0 else 0.5
    return float(1.0 / (1.0 + np.exp(-external / internal)))


def prefix_overlap(old: Sequence[bytes], inter: Sequence[float], new: Sequence[bytes]) -> float:
    """Return beta: which share of a chunk's attention went to chunks that are in ``new``, too.

    Args:
        old: the chunks before it where it was computed.
        inter: its attention to each of them.
        new: the chunks before it now.
    """
    if not old:
        return 0.0 if new else 1.0
    total = sum(inter)
    known = sum(each for chunk, each in zip(old, inter, strict=True) if chunk in set(new))
    return known / total if total > 0.0 else float(set(old) <= set(new))


def order_penalty(old: Sequence[bytes], new: Sequence[bytes]) -> float:
    """Return gamma: the share of pairs of common chunks whose order differs (Kendall's tau).

    Of a chunk that occurs more than once, its first place counts.
    """
    common = [chunk for chunk in dict.fromkeys(old) if chunk in set(new)]
    places = [new.index(chunk) for chunk in common]
    pairs = [(a, b) for place, a in enumerate(places) for b in places[place + 1 :]]
    return sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0


@dataclass
class Variant:
    """A chunk as it was computed behind some prefix.

    Attributes:
        prefix: the chunks before it, in order.
        inter: its attention to each of them, a mean over layers.
        impact: CCI.
        scores: [tokens] float32, each token's attention to what came before, a mean over layers.
        start: number of its first token.
        slot: of its last token, where the prefix cache has it.
        stamp: tells the token in that slot from others (``DonorIndex.stamp``).
        worth: f, at the look-up of number ``used``.
    """

    prefix: tuple[bytes, ...]
    inter: tuple[float, ...]
    impact: float
    scores: Float32Array
    start: int
    slot: int
    stamp: int
    worth: float = 1.0
    used: int = 0

    def overhead(self, prefix: Sequence[bytes], alpha: float) -> float:
        """Return CFO behind a prefix."""
        overlap = prefix_overlap(self.prefix, self.inter, prefix)
        known = overlap * (1.0 - order_penalty(self.prefix, prefix))
        return min(max(alpha * self.impact * (1.0 - known), 0.0), 1.0)

    @property
    def nbytes(self) -> int:
        """Memory of its statistics."""
        return self.scores.nbytes + sum(map(len, self.prefix)) + 8 * len(self.inter)


class VariantStore:
    """The variants of all chunks; those of least worth are forgotten.

    Args:
        method: how many there may be, and how their worth decays.
    """

    def __init__(self, method: CacheCraft) -> None:
        self._method = method
        self._chunks: dict[tuple[str, bytes], list[Variant]] = {}
        self._lookups = 0

    @property
    def nbytes(self) -> int:
        """Memory of all statistics, in bytes."""
        return sum(each.nbytes for variants in self._chunks.values() for each in variants)

    def __len__(self) -> int:
        return len(self._chunks)

    def variants(self, tenant: str, chunk: bytes) -> list[Variant]:
        """Return the variants of a tenant's chunk."""
        return list(self._chunks.get((tenant, chunk), ()))

    def best(
        self,
        tenant: str,
        chunk: bytes,
        prefix: Sequence[bytes],
        index: DonorIndex,
        alpha: float = 1.0,
    ) -> tuple[Variant, float] | None:
        """Return the variant with the least CFO, and that; None if there is none in the cache.

        Variants whose KV is evicted are forgotten.

        Args:
            tenant: whose it is.
            chunk: its id.
            prefix: the chunks before it.
            index: where cached tokens are.
            alpha: of the method.
        """
        there = [
            each for each in self._chunks.get((tenant, chunk), ())
            if index.stamp(each.slot) == each.stamp
        ]  # fmt: skip
        if not there:
            self._chunks.pop((tenant, chunk), None)
            return None
        self._chunks[tenant, chunk] = there
        found = min(there, key=lambda each: each.overhead(prefix, alpha))
        return found, found.overhead(prefix, alpha)

    def use(self, variant: Variant, overhead: float) -> None:
        """Note that a variant was taken: the less has to be repaired, the more it is worth."""
        self._lookups += 1
        variant.worth = self._worth(variant) + 1.0 / max(overhead, _LEAST_OVERHEAD)
        variant.used = self._lookups

    def add(self, tenant: str, chunk: bytes, variant: Variant) -> None:
        """Keep a variant, in place of one behind the same prefix."""
        variant.used = self._lookups
        known = self._chunks.setdefault((tenant, chunk), [])
        known[:] = [each for each in known if each.prefix != variant.prefix]
        known.append(variant)
        while len(known) > self._method.variants:
            known.remove(min(known[:-1], key=self._worth))
        while len(self._chunks) > self._method.chunks:
            others = [key for key in self._chunks if key != (tenant, chunk)]
            del self._chunks[min(others, key=self._chunk_worth)]

    def _chunk_worth(self, key: tuple[str, bytes]) -> float:
        return max(map(self._worth, self._chunks[key]))

    def _worth(self, variant: Variant) -> float:
        return variant.worth * self._method.decay ** (self._lookups - variant.used)


@dataclass
class _Observed:
    """Sums of a chunk's attention so far.

    Attributes:
        inter: [chunks before it] float64.
        intra: the same to itself.
        scores: [tokens] float32.
        seen: [layers, tokens] bool, whose attention is in the sums.
    """

    inter: list[float]
    scores: Float32Array
    seen: np.ndarray
    intra: float = 0.0


class ChunkedSequence(BlendedSequence):
    """Cache-Craft at work on one sequence.

    Attributes:
        bounds: numbers of the first token of each chunk, the text before them not counted, and of
            what follows the last one.
        overheads: CFO of each chunk whose KV was taken from elsewhere, by number from 0.
    """

    def __init__(
        self, name: str, method: CacheCraft, shared: ReuseKind, bounds: Sequence[int]
    ) -> None:
        super().__init__(name, method, shared)
        self.bounds = tuple(bounds)
        self.overheads: dict[int, float] = {}
        self._craft = method
        self._store = shared.state_of(method.statistics, lambda: VariantStore(method))
        self._ids: list[bytes] = []
        self._observed: dict[int, _Observed] = {}
        self._fresh: tuple[int, Float32Array] | None = None
        self._taken: list[tuple[Variant, float]] = []

    @property
    def check_layer(self) -> int:
        """See ``BlendedSequence``: rows are chosen before the first layer."""
        return -1

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        super().restart()
        self._observed, self.overheads = {}, {}

    def fork(self) -> SequenceMethod:
        """See ``SequenceMethod``."""
        return ChunkedSequence(self.name, self._craft, self.shared, self.bounds)

    def admitted(self, sequence: SequenceView) -> Admitted:
        """See ``SequenceMethod``: variants that were copied count as used."""
        self._taken, self.overheads = [], {}
        admitted = super().admitted(sequence)
        if not self.blends:
            self.overheads = {}
            return admitted
        for variant, overhead in self._taken:
            self._store.use(variant, overhead)
            self._touch(variant.slot)
        return admitted

    def find_donors(self, sequence: SequenceView, first: int, last: int) -> Donors | None:
        """See ``BlendedSequence``: take each chunk's variant that needs least repair."""
        spans: list[DonorSpan] = []
        repaired: list[Int64Array] = []
        for number, (start, end) in enumerate(pairwise(self.bounds)):
            begin = max(start, first)
            found = None if begin >= end else self._find(sequence, number)
            if found is None:
                continue
            variant, text, overhead = found
            again = self._craft.repaired(variant.scores, overhead) + start
            repaired.append(again[again >= begin])
            position = variant.start + begin - start
            spans.append(DonorSpan(begin, position, text[begin - start :]))
            self.overheads[number] = overhead
            self._taken.append((variant, overhead))
        if not spans:
            return None
        rows = np.concatenate(repaired)
        kept = sum(span.length for span in spans) - len(rows)
        return Donors(spans, kept, spans[-1].end, rows)

    def _find(
        self, sequence: SequenceView, number: int
    ) -> tuple[Variant, Int32Array, float] | None:
        """Return a chunk's variant, its slots and its CFO; None if all of it is computed."""
        ids, index = self._chunk_ids(sequence), self.shared.donors
        start, end = self.bounds[number], self.bounds[number + 1]
        best = self._store.best(
            sequence.tenant, ids[number + 1], ids[: number + 1], index, self._craft.alpha
        )
        if best is None or best[1] >= 1.0:
            return None
        variant, overhead = best
        text = index.text_ending(variant.slot, end - start)
        if text is None or (text.tokens != sequence.tokens[start:end]).any():
            return None
        return variant, text.slots, overhead

    def _touch(self, slot: int) -> None:
        """Have the prefix cache know that the text up to a slot was used."""
        index, cache = self.shared.donors, self.shared.pool.cache
        root, text = index.root_of(slot), index.text_up_to(slot)
        if root is not None:
            cache.match(root, text.tokens)

    def _chunk_ids(self, sequence: SequenceView) -> list[bytes]:
        """Return what tells chunks from others: that of the text before them, then each one's."""
        if not self._ids:
            tokens, bounds = sequence.tokens, (0, *self.bounds)
            self._ids = [_digest(tokens[start:end]) for start, end in pairwise(bounds)]
        return self._ids

    # --- statistics

    def _layers(self, first: int, end: int) -> range:
        every = self._craft.every
        return range(-(-first // every) * every, end, every)

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        """See ``SequenceMethod``: the rows of chunks."""
        first = sequence.computed
        start = max(self.bounds[0] - first, 0)
        end = min(self.bounds[-1] - first, tokens)
        return range(start, end) if start < end else range(0)

    def observe(self, first: int, queries: Float32Array) -> None:
        """See ``SequenceMethod``; the keys are read once the rows are committed."""
        self._fresh = (first, queries)

    def committed(self, sequence: SequenceView) -> int:
        """See ``SequenceMethod``: add the attention of rows that have just run to the sums."""
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            first, queries = fresh
            rows = np.arange(first, first + queries.shape[1])
            for layer in self._layers(0, len(queries)):
                self._add(sequence, rows, layer, queries[layer])
        return sequence.computed

    def observed_layers(self, first: int, end: int) -> range:
        """See ``BlendedSequence``."""
        return self._layers(first, end)

    def observe_rows(
        self, sequence: SequenceView, rows: Int64Array, layer: int, queries: Float32Array
    ) -> None:
        """See ``BlendedSequence``."""
        self._add(sequence, rows, layer, queries)

    def _add(
        self, sequence: SequenceView, rows: Int64Array, layer: int, queries: Float32Array
    ) -> None:
        """Add the attention of rows of chunks that are computed as a whole to the sums."""
        of_chunks = np.searchsorted(self.bounds, rows, side="right") - 1
        wanted = [
            number
            for number in np.unique(of_chunks).tolist()
            if 0 <= number < len(self.bounds) - 1 and number not in self.overheads
        ]
        inside = np.isin(of_chunks, wanted)
        if not inside.any():
            return
        assert sequence.kv is not None
        rows, of_chunks, queries = rows[inside], of_chunks[inside], queries[inside]
        keys = self.read_keys(sequence.kv.slots[: int(rows[-1]) + 1], layer)
        weights = head_weights(self.shared.runner.config, layer, queries, keys, rows)
        sums = block_sums(weights, (0, *self.bounds))
        for number in wanted:
            own = sums[of_chunks == number].astype(np.float64)
            self._add_to(number, layer, rows[of_chunks == number], own)

    def _add_to(self, number: int, layer: int, rows: Int64Array, sums: np.ndarray) -> None:
        start, size = self.bounds[number], self.bounds[number + 1] - self.bounds[number]
        layers = len(self._layers(0, self.shared.runner.config.layers))
        seen = self._observed.get(number)
        if seen is None:
            scores: Float32Array = np.zeros(size, np.float32)
            whether = np.zeros((layers, size), bool)
            seen = self._observed[number] = _Observed([0.0] * (number + 1), scores, whether)
        before = sums[:, : number + 1] / layers
        seen.scores[rows - start] += before.sum(axis=1)
        seen.intra += float(sums[:, number + 1].sum() / layers)
        seen.inter = [a + b for a, b in zip(seen.inter, before.sum(axis=0).tolist(), strict=True)]
        seen.seen[layer // self._craft.every, rows - start] = True

    def decide(self, sequence: SequenceView) -> bool:
        """See ``SequenceMethod``: keep variants of chunks that were computed as a whole, and are
        cached now."""
        kv = sequence.kv
        if kv is None:
            return True
        for number in list(self._observed):
            end, seen = self.bounds[number + 1], self._observed[number]
            if end <= kv.shared and seen.seen.all():
                del self._observed[number]
                self._keep(sequence, number, seen, int(kv.slots[end - 1]))
        return True

    def _keep(self, sequence: SequenceView, number: int, seen: _Observed, slot: int) -> None:
        ids, stamp = self._chunk_ids(sequence), self.shared.donors.stamp(slot)
        if not stamp:
            return
        sizes = [end - start for start, end in pairwise((0, *self.bounds))]
        impact = context_impact(seen.inter, sizes[: number + 1], seen.intra, sizes[number + 1])
        prefix, inter = tuple(ids[: number + 1]), tuple(seen.inter)
        start = self.bounds[number]
        variant = Variant(prefix, inter, impact, seen.scores, start, slot, stamp)
        self._store.add(sequence.tenant, ids[number + 1], variant)


def _digest(tokens: Int32Array) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()
