"""EpisodicSequence: a conversation that is computed in blocks, or whose cache is loaded.

Rows of the history run in ordinary steps, block by block. At a block's end, the prompt that scores
its keys runs in slots behind it, which the next block will use, and the keys that stay are packed
as after any eviction. Points depend on the history alone, so load and preemption change nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np

from midfill.arrays import Float32Array, Int32Array
from midfill.errors import InvalidRequestError
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.episodes.clustering import Episodes, TokenVectors, find_episodes
from midfill.methods.episodes.method import WINDOW_ROWS, EpisodicMethod
from midfill.methods.episodes.scores import (
    best_keys,
    cached_scores,
    every_key,
    window_scores,
)
from midfill.methods.episodes.store import EpisodeCache, EpisodeStore
from midfill.methods.episodes.turns import Parts
from midfill.methods.evict.eviction import Eviction
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.sequence_method import (
    Admitted,
    Aspect,
    PlainLengths,
    Prefill,
    RequestFacts,
    SequenceMethod,
    SequenceView,
)
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner

_MAX_ROWS = 512
_SAMPLE = 8192  # tokens


@dataclass
class EpisodeCounts:
    """What methods of this kind have done.

    Attributes:
        loaded: caches that were loaded.
        blocks: of histories that were decided about.
        parked_bytes: the most that one cache has taken in host memory, until that is taken.
    """

    loaded: int = 0
    blocks: int = 0
    parked_bytes: int = 0


@dataclass(frozen=True)
class EpisodeState:
    """What all conversations have in common.

    Attributes:
        runner: the model and its KV cache.
        eviction: moves cells.
        counts: what was done.
        stores: the caches of conversations by their memory, in MiB: a request that asks for less
            takes nothing from others.
    """

    runner: Runner
    eviction: Eviction
    counts: EpisodeCounts
    stores: dict[int, EpisodeStore] = field(default_factory=dict)

    def store(self, memory: int) -> EpisodeStore:
        """Return the store of so many MiB."""
        return self.stores.setdefault(memory, EpisodeStore(memory << 20))

    def kept_slots(self, method: EpisodicMethod, history: int) -> int:
        """Return the most slots that what stays of a history fills."""
        layers, full = self.runner.config.layers, self.eviction.full_layers
        shown = max((self.runner.config.sliding_window or 0) - 1, 1) if full.is_part else 0
        kept = method.budgets(history).sum() + shown * (layers - full.config.layers)
        return min(-(-int(kept) // layers), history)

    @cached_property
    def token_vectors(self) -> TokenVectors:
        """What makes vectors of embeddings; of a sample of the vocabulary."""
        vocab = self.runner.config.vocab
        sample = np.linspace(0, vocab - 1, min(vocab, _SAMPLE)).astype(np.int32)
        return TokenVectors(self.embeddings(sample))

    def embeddings(self, tokens: Int32Array) -> Float32Array:
        """Return the input embeddings of [n] int32 tokens: float32 [n, hidden]."""
        found = []
        for start in range(0, len(tokens), _MAX_ROWS):
            part = tokens[start : start + _MAX_ROWS]
            batch = _batch(part, np.zeros(len(part), np.int32), 0, None, observed=False)
            hidden = self.runner.embed(batch)
            found.append(np.asarray(self.runner.logits_ops.to_numpy(hidden), np.float32))
        return np.concatenate(found)


@dataclass(frozen=True)
class _Episode:
    """The episode that a question goes to.

    Attributes:
        number: which one.
        patch: [n] int32, the tokens whose queries score keys for it.
    """

    number: int
    patch: Int32Array


class EpisodicSequence(SequenceMethod):
    """EpiCache, or a null of it, at work on one prompt.

    Args:
        name: how requests name the method.
        method: what stays.
        state: of all conversations.
        tokens: [n] int32, the prompt.
        parts: of it, where there is a history that is compressed.
        tenant: whose it is.
        scored: whether log probabilities of the prompt's tokens are wanted.
    """

    title = "the method of episodes"
    changes = frozenset({Aspect.KEYS, Aspect.CHUNKS})
    needs = frozenset({Aspect.ROWS, Aspect.POSITIONS, Aspect.ROOT, Aspect.LISTS, Aspect.READS})

    def __init__(
        self,
        name: str,
        method: EpisodicMethod,
        state: EpisodeState,
        tokens: Int32Array,
        parts: Parts,
        tenant: str,
        *,
        scored: bool,
    ) -> None:
        self.name = name
        self._method, self._state, self._tokens = method, state, tokens
        self._parts, self._tenant, self._scored = parts, tenant, scored
        self._history = parts.history
        self._budgets = method.budgets(parts.history)
        self._kept = state.kept_slots(method, parts.history)
        digest = blake2b(tokens[: parts.history].tobytes(), digest_size=16).digest()
        self._key: Hashable = (tenant, digest, method.identity)
        self._store = state.store(method.rule.memory)
        self._found: _Episode | None = None
        self._window: list[Float32Array] = []
        self._extra_rows = 0

    # --- which episode it is about

    @property
    def _episode(self) -> _Episode:
        """The episode, looked up when it is first asked for."""
        if self._found is None:
            method, bounds = self._method, self._method.windows(self._tokens, self._parts)
            history = self._tokens[: self._history]
            episodes = self._episodes(history, bounds)
            number = episodes.nearest(self._tokens[self._parts.question :])
            if method.route == "next":
                number = (number + 1) % len(episodes.centroids)
            patch = method.patch(history, bounds, episodes.representatives[number])
            self._found = _Episode(number, patch)
        return self._found

    def _episodes(self, history: Int32Array, bounds: Int32Array) -> Episodes:
        rule, store = self._method.rule, self._store
        episodes = store.find(self._key, Episodes)
        if episodes is None:
            embeddings = self._state.embeddings(np.unique(history))
            vectors = self._state.token_vectors.of(embeddings)
            episodes = find_episodes(history, bounds, vectors, rule.episodes, rule.near, rule.seed)
            store.keep(self._key, episodes)
        return episodes

    def _stored(self) -> EpisodeCache | None:
        """Return the episode's cache, if it is there and may stand for the history."""
        if self._scored:  # rows of the history run, since their logits are wanted
            return None
        return self._store.find((self._key, self._episode.number), EpisodeCache)

    # --- how it may run

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """See ``SequenceMethod``: what comes before the first eviction is exact KV."""
        if self._stored() is not None:
            return 0
        block = self._method.rule.block
        first = (int(self._budgets.min()) // block + 1) * block
        return min(limit, min(first, self._history) - 1)

    def found_elsewhere(self, sequence: SequenceView, cached: int) -> int:
        """See ``SequenceMethod``."""
        return 0 if self._stored() is None else self._history

    def slots_needed(self, length: int) -> int | None:
        """See ``SequenceMethod``: enough to come to the end of the prompt."""
        stored = self._stored()
        if stored is not None:
            return stored.slots + length - self._history
        return self._kept + self._room(length)

    def slots_ahead(self, sequence: SequenceView) -> int:
        """See ``SequenceMethod``: the next block's, whose place the scoring prompt takes before."""
        assert sequence.kv is not None
        if sequence.computed >= self._history:
            return sequence.length - sequence.kv.first
        return sequence.computed - sequence.kv.first + self._room(sequence.length)

    def _room(self, length: int) -> int:
        """Return how many slots a block and its scoring take, and the question after it."""
        block = min(self._method.rule.block, self._history)
        return max(block + len(self._episode.patch), length - self._history)

    def prefill(self, sequence: SequenceView) -> Prefill:
        """See ``SequenceMethod``."""
        return "chunks"

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``: the end of the block."""
        if sequence.computed >= self._history:
            return None
        block = self._method.rule.block
        return min((sequence.computed // block + 1) * block, self._history)

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        """See ``SequenceMethod``: the last of a block, where these score its keys."""
        end = self.barrier(sequence)
        if self._method.scorer != "window" or end is None:
            return range(0)
        first = max(end - WINDOW_ROWS - sequence.computed, 0)
        return range(first, max(first, tokens))

    def observe(self, first: int, queries: Float32Array) -> None:
        """See ``SequenceMethod``."""
        self._window.append(queries)

    # --- what happens to it

    def admitted(self, sequence: SequenceView) -> Admitted:
        """See ``SequenceMethod``: load the episode's cache."""
        stored, kv = self._stored(), sequence.kv
        if stored is None or kv is None:
            return Admitted(sequence.computed)
        stored.load(kv, self._state.runner.cells, self._state.eviction.pool)
        kv.reserve(sequence.length - self._history)
        self._state.counts.loaded += 1
        return Admitted(self._history, self._history)

    def decide(self, sequence: SequenceView) -> bool:
        """See ``SequenceMethod``: evict at the end of a block, once keys exceed a layer's budget.

        At the history's end, what stays is kept for its next question.
        """
        kv, point = sequence.kv, sequence.computed
        if kv is None or not kv.first < point <= self._history:
            return True
        is_end = point == self._history
        if not is_end and (point % self._method.rule.block or point <= self._budgets.min()):
            return True
        eviction = self._state.eviction
        keys = eviction.keys(kv, point)
        selection = self._select(kv, eviction.full_layers.keys(keys), point)
        self._window = []
        self._state.counts.blocks += 1
        if not eviction.apply(kv, keys, selection, point):
            return False
        if is_end and not self._scored:
            self._save(kv)
        return True

    def _save(self, kv: SequenceKV) -> None:
        counts = self._state.counts
        cache = EpisodeCache.save(kv, self._state.runner.cells)
        self._store.keep((self._key, self._episode.number), cache)
        counts.parked_bytes = max(counts.parked_bytes, cache.nbytes)

    def take_extra_rows(self) -> int:
        """See ``SequenceMethod``."""
        taken, self._extra_rows = self._extra_rows, 0
        return taken

    def shares_slots(self, is_compressed: bool) -> bool:
        """See ``SequenceMethod``: other answers load the cache, or compute it."""
        return False

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        self._window = []

    def fork(self) -> "EpisodicSequence":
        """See ``SequenceMethod``."""
        return EpisodicSequence(
            self.name, self._method, self._state, self._tokens, self._parts, self._tenant,
            scored=self._scored,
        )  # fmt: skip

    # --- which keys stay

    def _select(self, kv: SequenceKV, keys: SequenceKeys, point: int) -> Selection:
        """Return what stays of ``keys``, those of the first ``point`` tokens."""
        if (keys.counts <= np.repeat(self._budgets, keys.config.kv_heads)).all():
            return every_key(keys)
        method = self._method
        scores = self._scores(kv, keys, point)
        always = method.always_kept(self._parts)
        return best_keys(scores, self._budgets, always, pooled=method.rule.pooled)

    def _scores(self, kv: SequenceKV, keys: SequenceKeys, point: int) -> list[Float32Array]:
        if self._method.scorer == "random":
            generator = np.random.default_rng([self._method.rule.seed, point])
            return [generator.random(count, np.float32) for count in keys.counts]
        full_layers = self._state.eviction.full_layers
        if self._method.scorer == "window":
            rows = np.concatenate(self._window, axis=1)[:, -WINDOW_ROWS:]
            return window_scores(keys, full_layers.queries(rows))
        return cached_scores(keys, full_layers.queries(self._run_patch(kv, point)))

    def _run_patch(self, kv: SequenceKV, point: int) -> Float32Array:
        """Run the prompt that scores keys behind the first ``point`` tokens; return its queries.

        It lies in slots that nothing is computed in yet, and is forgotten.

        Returns:
            float32 [layers, rows, query_heads, head_dim].
        """
        runner, patch = self._state.runner, self._episode.patch
        plan = None if kv.prefix is None else AttentionPlan(kv.prefix.index)
        found = []
        for start in range(0, len(patch), _MAX_ROWS):
            rows = patch[start : start + _MAX_ROWS]
            slots = kv.slots[: point - kv.first + start + len(rows)]
            batch = _batch(rows, slots, point + start, plan, observed=True)
            runner.run_layers(batch, runner.embed(batch), 0, runner.config.layers)
            found.append(runner.observed_queries(batch))
        self._extra_rows += len(patch)
        return np.concatenate(found, axis=1)


def _batch(
    tokens: Int32Array,
    slots: Int32Array,
    position: int,
    plan: AttentionPlan | None,
    *,
    observed: bool,
) -> ForwardBatch:
    """Return a batch of one request's rows.

    Args:
        tokens: [rows] int32.
        slots: [n] int32, what the rows attend to; the last are their own.
        position: of the first row.
        plan: what else they attend to.
        observed: whether their queries are wanted.
    """
    numbers = np.arange(len(tokens), dtype=np.int32)
    return ForwardBatch(
        token_ids=tokens,
        positions=numbers + np.int32(position),
        write_slots=slots[len(slots) - len(tokens) :],
        query_indptr=np.array([0, len(tokens)], np.int32),
        kv_indptr=np.array([0, len(slots)], np.int32),
        kv_slots=slots,
        logit_rows=numbers[:0],
        observed_rows=numbers if observed else numbers[:0],
        attention=() if plan is None else (plan,),
    )


class EpisodeKind(PlainLengths):
    """Puts methods that keep a cache per episode to work.

    Args:
        runner: the model and its KV cache.
        eviction: moves cells of its pool.

    Attributes:
        counts: what was done.
    """

    def __init__(self, runner: Runner, eviction: Eviction) -> None:
        self.counts = EpisodeCounts()
        self._state = EpisodeState(runner, eviction, self.counts)

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """See ``MethodKind.attach``: a prompt without a history that is compressed is served as
        without the method."""
        if not isinstance(method, EpisodicMethod):
            return None
        tokens = sequence.tokens[: request.prompt].copy()
        parts = method.parts(tokens, request.compress_after)
        if not method.compresses(parts):
            return PlainConversation(name)
        self._check(name, method, parts)
        return EpisodicSequence(
            name, method, self._state, tokens, parts, sequence.tenant,
            scored=request.scores_prompt,
        )  # fmt: skip

    def _check(self, name: str, method: EpisodicMethod, parts: Parts) -> None:
        """Refuse a prompt that a budget or the pool is too small for.

        Raises:
            InvalidRequestError: names what is too small.
        """
        always, least = method.always_kept(parts), int(method.budgets(parts.history).min())
        if least <= always < parts.history:
            what = "the system prompt" if method.rule.system else "what always stays"
            raise InvalidRequestError(
                f"{name}: {what} has {always} tokens, and a layer keeps {least}: use a larger"
                " budget",
                param="method",
            )
        needed = self._state.kept_slots(method, parts.history) + 2 * method.rule.block
        if needed > self._state.runner.slots:
            raise InvalidRequestError(
                f"{name}: budget and two blocks take {needed} tokens of KV, and the cache has"
                f" {self._state.runner.slots}: use a smaller budget or block",
                param="method",
            )

    def fitting_tokens(self, methods: Sequence[object], request: RequestFacts) -> int | None:
        """See ``MethodKind.fitting_tokens``: of the history, only what stays counts."""
        for method in methods:
            if isinstance(method, EpisodicMethod):
                tokens = np.array(request.token_ids, np.int32)
                parts = method.parts(tokens, request.compress_after)
                if method.compresses(parts):
                    kept = self._state.kept_slots(method, parts.history)
                    return parts.history + self._state.runner.slots - kept
        return None

    def longest_prompt(self, methods: Sequence[object], context: int) -> int | None:
        """See ``MethodKind.longest_prompt``: histories may exceed the pool."""
        is_one = any(isinstance(method, EpisodicMethod) for method in methods)
        return context if is_one else None


class PlainConversation(SequenceMethod):
    """A prompt that the method leaves as it is; it still can't stand beside what it relies on."""

    title = EpisodicSequence.title
    changes, needs = EpisodicSequence.changes, EpisodicSequence.needs

    def __init__(self, name: str) -> None:
        self.name = name
