"""Nulls: what each method of compression has to beat to show that it knows something.

A null spends a method's budget on something else, on the same prompt: on tokens at random or at
equal distances; by the method's own scores, reversed; by the plain score, SnapKV's pooled attention
with the method's own window and kernel; or it leaves out the one thing that the method adds, such
as unequal layers, or chooses heads at random. Only what differs between a method and a null can
explain why one of them finds more.

KVMerger's nulls evict instead of merging, also by the score of H2O, or merge otherwise: windows of
one length wherever they lie, the least similar neighbours, or the same sets by their plain mean.
Those of methods that quantise are in ``fewer_bits`` and ``spent_bits``, those of methods whose rows
choose pages in ``other_pages``, or look sentences up in ``other_sentences``.

Every null of eviction keeps exactly as many cells as its method, but for "no mean key", which keeps
a cell less per streaming head. Random choices follow from the prompt alone.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from midfill.arrays import BoolArray, Float32Array
from midfill.methods.budget import require
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict import compresskv, duoattention, minicache, razorattention, uncomp
from midfill.methods.evict.accumulated_attention import ObservationMemory
from midfill.methods.evict.cake import Cake
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.h2o import H2O
from midfill.methods.evict.kvmerger import NAME as KVMERGER
from midfill.methods.evict.kvmerger import KVMerger
from midfill.methods.evict.method import CompressionMethod, SequenceKeys
from midfill.methods.evict.snapkv import SnapKV
from midfill.methods.evict.streaming_heads import HeadSplit
from midfill.methods.evict.window_attention import head_attention, window_attention
from midfill.methods.method import ModelSpecific
from midfill.methods.quantize.mikv import MiKV
from midfill.methods.quantize.zipcache import ZipCache
from midfill.methods.registry import parse_name, resolve_method, split_methods
from midfill.methods.sentences.method import ChosenSentences
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_decode.method import SparseDecodeMethod
from midfill.models.config import ModelConfig
from midfill_lab.bench.methods import fewer_bits, other_pages, other_sentences, spent_bits
from midfill_lab.bench.methods.spending import (
    DrawnMethod,
    EvenKeys,
    KeyChoice,
    RandomKeys,
    RankedKeys,
    Scores,
    SpentOtherwise,
)


@dataclass(frozen=True)
class _Prepared:
    """A method that is ready for a model.

    Attributes:
        settings: its hyper-parameters.
        method: what requests use.
        model: the model.
    """

    settings: object
    method: CompressionMethod
    model: ServedModel

    @property
    def config(self) -> ModelConfig:
        """The model as methods see it."""
        return FullLayers(self.model.config).config

    @property
    def window(self) -> int:
        """The last rows that the method observes and keeps, or SnapKV's where it has none."""
        return int(getattr(self.settings, "window", 0)) or _SNAPKV.window


_SNAPKV = SnapKV()

Null = Callable[[_Prepared], CompressionMethod]


def _spent(found: _Prepared, choice: KeyChoice, *, equally: bool) -> CompressionMethod:
    return SpentOtherwise(found.method, found.config, choice, found.window, equally)


def _random(found: _Prepared) -> CompressionMethod:
    return _spent(found, RandomKeys(), equally=True)


def _even(found: _Prepared) -> CompressionMethod:
    return _spent(found, EvenKeys(), equally=True)


def _plain(found: _Prepared) -> CompressionMethod:
    kernel = int(getattr(found.settings, "kernel", _SNAPKV.kernel))
    plain = SnapKV(budget=found.window + 1, window=found.window, kernel=kernel)
    return _spent(found, RankedKeys(partial(_window_scores, plain)), equally=True)


def _reversed(found: _Prepared) -> CompressionMethod:
    return _spent(found, RankedKeys(_own_scores(found.method), reverse=True), equally=False)


def _equal(found: _Prepared) -> CompressionMethod:
    return _spent(found, RankedKeys(_own_scores(found.method)), equally=True)


def _own_scores(method: CompressionMethod) -> Scores:
    """Return what gives a method's scores of a prompt."""
    if isinstance(method, SnapKV | Cake):
        return partial(_window_scores, method)
    if isinstance(method, compresskv.RetrievalVotes):
        return partial(_votes, method)
    assert isinstance(method, uncomp.GroupedHeads)
    return partial(_head_scores, method.method.kernel)


def _window_scores(
    method: SnapKV | Cake, keys: SequenceKeys, queries: Float32Array
) -> list[Float32Array]:
    rows, kv_heads = queries.shape[1], keys.config.kv_heads
    return [
        head
        for layer in range(keys.config.layers)
        for head in method.scores(window_attention(keys, queries, layer)[:, :, :-rows], kv_heads)
    ]


def _votes(
    method: compresskv.RetrievalVotes, keys: SequenceKeys, queries: Float32Array
) -> list[Float32Array]:
    kernel, kv_heads = method.method.kernel, keys.config.kv_heads
    return [
        votes
        for layer, heads in enumerate(method.heads)
        for votes in [compresskv.head_votes(keys, queries, layer, heads, kernel)] * kv_heads
    ]


def _head_scores(kernel: int, keys: SequenceKeys, queries: Float32Array) -> list[Float32Array]:
    rows = queries.shape[1]
    return [
        uncomp.window_scores(head_attention(keys, queries, head)[:, :, :-rows], kernel)
        for head in range(keys.heads)
    ]


def _all_heads_vote(found: _Prepared) -> CompressionMethod:
    method = _votes_of(found.method)
    return replace(method, heads=(tuple(range(found.config.query_heads)),) * found.config.layers)


def _random_heads_vote(found: _Prepared) -> CompressionMethod:
    method, config = _votes_of(found.method), found.config

    def draw(generator: np.random.Generator) -> CompressionMethod:
        drawn = [
            generator.choice(config.query_heads, len(heads), replace=False)
            for heads in method.heads
        ]
        return replace(method, heads=tuple(tuple(heads.tolist()) for heads in drawn))

    return DrawnMethod(method, config, draw)


def _votes_of(method: CompressionMethod) -> compresskv.RetrievalVotes:
    assert isinstance(method, compresskv.RetrievalVotes)
    return method


def _random_groups(found: _Prepared) -> CompressionMethod:
    method = _groups_of(found.method)
    shape = (found.config.layers, found.config.kv_heads)

    def draw(generator: np.random.Generator) -> CompressionMethod:
        tables = {"marks": generator.random(shape), "entropy": np.zeros(shape)}
        return replace(method, high=tuple(uncomp.high_heads(tables).tolist()))

    return DrawnMethod(method, found.config, draw)


def _reversed_groups(found: _Prepared) -> CompressionMethod:
    tables = load_tables(uncomp.NAME, uncomp.VERSION, found.model)
    lowest = {name: -tables[name] for name in ("marks", "entropy")}
    return replace(_groups_of(found.method), high=tuple(uncomp.high_heads(lowest).tolist()))


def _groups_of(method: CompressionMethod) -> uncomp.GroupedHeads:
    assert isinstance(method, uncomp.GroupedHeads)
    return method


def _random_heads(found: _Prepared) -> CompressionMethod:
    method = _split_of(found.method)

    def draw(generator: np.random.Generator) -> CompressionMethod:
        return replace(method, retrieval=tuple(generator.permutation(method.retrieval).tolist()))

    return DrawnMethod(method, found.config, draw)


def _reversed_gates(found: _Prepared) -> CompressionMethod:
    """Return DuoAttention whose retrieval heads are those with the smallest gates."""
    assert isinstance(found.settings, duoattention.DuoAttention)
    gates = load_tables(duoattention.NAME, duoattention.VERSION, found.model)["gates"]
    return _with_heads(found, duoattention.retrieval_heads(-gates, found.settings.sparsity))


def _reversed_induction(found: _Prepared) -> CompressionMethod:
    """Return RazorAttention with as many retrieval heads, those with the least induction."""
    tables = load_tables(razorattention.NAME, razorattention.VERSION, found.model)
    retrieval = np.array(_split_of(found.method).retrieval)
    scores = tables["induction"].reshape(len(retrieval), -1).max(axis=1)
    lowest = np.zeros_like(retrieval)
    lowest[np.argsort(scores, kind="stable")[: retrieval.sum()]] = True
    return _with_heads(found, lowest)


def _no_mean_key(found: _Prepared) -> CompressionMethod:
    method = _split_of(found.method)
    return replace(method, rule=replace(method.rule, mean=False))


def _plain_average(found: _Prepared) -> CompressionMethod:
    """Return MiniCache with the mean of both layers' vectors, which counts as it is."""
    return replace(_merging_of(found.method), merge=_average)


def _average(lower: Float32Array, upper: Float32Array) -> minicache.MergedVectors:
    ones = np.ones(len(lower), np.float32)
    return minicache.MergedVectors((lower + upper) * np.float32(0.5), ones, ones)


def _upper_layer(found: _Prepared) -> CompressionMethod:
    """Return MiniCache with the upper layer's vectors in the place of both."""
    return replace(_merging_of(found.method), merge=_upper)


def _upper(lower: Float32Array, upper: Float32Array) -> minicache.MergedVectors:
    ones = np.ones(len(lower), np.float32)
    return minicache.MergedVectors(upper, ones, ones)


def _merging_of(method: CompressionMethod) -> minicache.MergedLayers:
    assert isinstance(method, minicache.MergedLayers)
    return method


def _with_heads(found: _Prepared, retrieval: BoolArray) -> CompressionMethod:
    return replace(_split_of(found.method), retrieval=tuple(retrieval.tolist()))


def _split_of(method: CompressionMethod) -> HeadSplit:
    assert isinstance(method, HeadSplit)
    return method


class FixedWindows(KVMerger):
    """Merges windows of tokens whatever their keys, of one length but for a factor of two."""

    def similarity(self, keys: Float32Array) -> Float32Array:
        """Return numbers [n - 1] whose k least lie evenly among them, for any k.

        They are the places' bits in reverse order (van der Corput's sequence). Heads whose places
        are equal differ by their keys' similarity, so that the budget is met to the cell.
        """
        places, bits = np.arange(1, len(keys)), len(keys).bit_length()
        reverse = sum((places >> bit & 1) * 2.0 ** -(bit + 1) for bit in range(bits))
        found: Float32Array = reverse + super().similarity(keys) * 2.0 ** -(bits + 2)
        return found.astype(np.float32)


class LeastSimilar(KVMerger):
    """Merges those neighbours first whose keys are least alike."""

    def similarity(self, keys: Float32Array) -> Float32Array:
        """Return the cosine similarity of each key [n, head_dim] to the next, negated: [n - 1]."""
        return -super().similarity(keys)


_FLAT = 1e6
"""A width of Gaussians beside which no two keys are far apart."""


def _heavy_hitters(found: _Prepared) -> CompressionMethod:
    method = _merger_of(found)
    require(
        method.epsilon == 0,
        "H2O spends its budget, which it keeps to only if epsilon is left out",
        KVMERGER,
    )
    return H2O(budget=method.budget, interval=0)


def _fixed_windows(found: _Prepared) -> CompressionMethod:
    settings = replace(_merger_of(found), sigma=_FLAT)
    return FixedWindows(**asdict(settings))


def _least_similar(found: _Prepared) -> CompressionMethod:
    return LeastSimilar(**asdict(_merger_of(found)))


def _plain_mean(found: _Prepared) -> CompressionMethod:
    return replace(_merger_of(found), sigma=_FLAT)


def _merger_of(found: _Prepared) -> KVMerger:
    assert isinstance(found.settings, KVMerger)
    return found.settings


def _changed(change: Callable[[object], CompressionMethod]) -> Null:
    """Return the null that a change of a method's hyper-parameters makes."""
    return lambda found: change(found.settings)


def _sized(change: Callable[[object, ModelConfig], CompressionMethod]) -> Null:
    """Return the null that a change makes which depends on the model's shape."""
    return lambda found: change(found.settings, found.config)


def _pages(change: Callable[[SparseDecodeMethod], SparseDecodeMethod]) -> Null:
    """Return the null that a change of what rows read makes."""
    return lambda found: cast("CompressionMethod", change(cast("SparseDecodeMethod", found.method)))


def _sentences(change: Callable[[ChosenSentences], ChosenSentences]) -> Null:
    """Return the null that a change of which sentences rows read makes."""
    return lambda found: cast("CompressionMethod", change(cast("ChosenSentences", found.method)))


_POSITIONS: Mapping[str, Null] = {"at random": _random, "evenly": _even}
_KEYS: Mapping[str, Null] = {**_POSITIONS, "plain score": _plain}
_SCORED: Mapping[str, Null] = {**_KEYS, "reversed score": _reversed}

NULLS: Mapping[str, Mapping[str, Null]] = {
    "streamingllm": _KEYS,
    "lacache": _KEYS,
    "kvmerger": {
        **_KEYS,
        "accumulated score": _heavy_hitters,
        "reversed score": _least_similar,
        "fixed windows": _fixed_windows,
        "plain mean": _plain_mean,
    },
    "snapkv": {**_POSITIONS, "reversed score": _reversed},
    "cake": {**_SCORED, "equal layers": _equal},
    "compresskv": {
        **_SCORED,
        "equal layers": _equal,
        "all heads vote": _all_heads_vote,
        "random heads vote": _random_heads_vote,
    },
    "uncomp": {
        **_SCORED,
        "equal groups": _equal,
        "reversed groups": _reversed_groups,
        "random groups": _random_groups,
    },
    "razorattention": {
        **_KEYS,
        "random heads": _random_heads,
        "reversed heads": _reversed_induction,
        "no mean key": _no_mean_key,
    },
    "duoattention": {
        **_KEYS,
        "random heads": _random_heads,
        "reversed heads": _reversed_gates,
    },
    "minicache": {
        **_KEYS,
        "plain average": _plain_average,
        "upper layer alone": _upper_layer,
    },
    "gear": {
        "smaller groups": _sized(spent_bits.smaller_groups),
        "wider codes": _sized(spent_bits.wider_codes),
        "random directions": _changed(spent_bits.random_directions),
        "random outliers": _changed(spent_bits.random_outliers),
    },
    "mikv": {
        "random split": _changed(spent_bits.random_split),
        "reversed score": _changed(spent_bits.reversed_score),
        "uniform bits": _sized(spent_bits.uniform_bits),
        "eviction": _sized(spent_bits.eviction),
        "no balancer": _changed(spent_bits.no_balancer),
    },
    "kivi": {"keys per token": _changed(fewer_bits.keys_per_token)},
    "zipcache": {
        "random split": _changed(fewer_bits.random_split),
        "accumulated score": _changed(fewer_bits.accumulated_attention),
        "uniform bits": _changed(fewer_bits.uniform_bits),
        "uniform bits per token": _changed(fewer_bits.uniform_bits_per_token),
    },
    "lserve": {
        "pages at random": _pages(other_pages.random_pages),
        "recent pages": _pages(other_pages.recent_pages),
        "summaries of whole pages": _pages(other_pages.whole_page_summaries),
    },
    "hip": {
        "blocks at random": _pages(other_pages.random_pages),
        "recent blocks": _pages(other_pages.recent_pages),
        "pages of 64 keys": _pages(other_pages.whole_pages),
        "every block scored": _pages(other_pages.every_block_scored),
    },
    "sentencekv": {
        "sentences at random": _sentences(other_sentences.random_sentences),
        "first and last keys": _sentences(other_sentences.recent_sentences),
        "pages of 16 tokens": _sentences(other_sentences.fixed_pages),
    },
}
"""What each method is compared with, by what the null spends the budget on. H2O's scores come block
by block, so nothing can be spent otherwise at the prompt's end: it has none."""


def null_titles(specification: str) -> Sequence[str]:
    """Return on what the nulls of a method spend its budget; none where it has no nulls.

    Several methods together have none: each of them alone is what they are compared with.
    """
    parts = split_methods(specification)
    return tuple(NULLS.get(parse_name(parts[0]), ())) if len(parts) == 1 else ()


def make_null(specification: str, title: str, model: ServedModel) -> CompressionMethod:
    """Return a null of a method.

    Args:
        specification: the method's.
        title: one of ``null_titles``.
        model: that it is used with.

    Raises:
        InvalidRequestError: the method doesn't suit the model, or trims prompts while they are
            computed, so that nothing is left to choose at their ends.
    """
    settings = resolve_method(specification)
    method = settings.for_model(model) if isinstance(settings, ModelSpecific) else settings
    assert isinstance(method, CompressionMethod | SparseDecodeMethod | ChosenSentences)
    require(
        not getattr(settings, "cascade", 0),
        "the nulls of a method are compared with it at the prompt's end: leave out cascade=1",
        parse_name(specification),
    )
    return NULLS[parse_name(specification)][title](
        _Prepared(settings, cast("CompressionMethod", method), model)
    )


def share_observations(nulls: Iterable[object]) -> None:
    """Have nulls that observe the same rows remember together what these have attended to.

    They decide otherwise on the same scores, and to observe all rows of a prompt takes far longer
    than to decide.
    """
    memories: dict[Hashable, ObservationMemory] = {}
    for null in nulls:
        match null:
            case MiKV():
                observed: Hashable = MiKV
            case ZipCache():
                observed = ZipCache, null.recent, null.random
            case _:
                continue
        vars(null)["memory"] = memories.setdefault(observed, ObservationMemory())
