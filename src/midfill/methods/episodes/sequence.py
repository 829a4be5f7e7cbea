"""EpisodicSequence: a conversation that is computed in blocks, or whose cache is loaded.

Rows of the history run in ordinary steps, block by block. At a block's end, the prompt that scores
its keys runs in slots behind it, which the next block will use, a part per step, and the keys that
stay are packed as after any eviction. Points depend on the history alone, so load and preemption
change nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from midfill.arrays import Float32Array, Float64Array, Int32Array
from midfill.errors import InvalidRequestError
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.episodes.clustering import (
    Episodes,
    TokenVectors,
    find_sentence_episodes,
    find_token_episodes,
)
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
    MethodChunk,
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
_PART = 64
"""Rows of the scoring prompt per step: others wait no longer than for half a chunk of a prompt."""
_READ_PER_ROW = 4
"""Tokens that a sentence encoder reads per step instead of each of these rows. Encoders are small:
all-MiniLM-L6-v2 has a tenth of the default model's weights."""
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
        scored: whether log probabilities of the history's tokens are wanted.
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
        self._patch_queries: list[Float32Array] | None = None  # None: no decision waits for them
        self._points: list[Float64Array] = []

    # --- which episode it is about

    @cached_property
    def _bounds(self) -> Int32Array:
        """The bounds of the history's windows."""
        return self._method.windows(self._tokens, self._parts)

    @property
    def _is_divided(self) -> bool:
        """Whether the history's episodes are known, or are found at once."""
        if self._found is not None or self._method.encode is None:
            return True
        return self._store.find(self._key, Episodes) is not None

    @property
    def _episode(self) -> _Episode:
        """The episode, looked up when it is first asked for."""
        if self._found is None:
            method, history = self._method, self._tokens[: self._history]
            episodes = self._store.find(self._key, Episodes)
            if episodes is None:
                episodes = self._divide(history)
            number = episodes.nearest(self._tokens[self._parts.question :])
            if method.route == "next":
                number = (number + 1) % len(episodes.centroids)
            patch = method.patch(history, self._bounds, episodes.representatives[number])
            self._found = _Episode(number, patch)
        return self._found

    def _divide(self, history: Int32Array) -> Episodes:
        """Find the history's episodes, and keep them for its next question."""
        rule, encode = self._method.rule, self._method.encode
        choice = (rule.episodes, rule.near, rule.seed)
        if encode is not None:
            self._embed(len(history))
            episodes = find_sentence_episodes(np.stack(self._points), encode, *choice)
        else:
            vectors = self._state.token_vectors.of(self._state.embeddings(np.unique(history)))
            episodes = find_token_episodes(history, self._bounds, vectors, *choice)
        self._store.keep(self._key, episodes)
        return episodes

    def _embed(self, tokens: int) -> None:
        """Have the encoder read the next windows: one, and more while they have so many tokens."""
        encode, bounds = self._method.encode, self._bounds
        assert encode is not None
        first = len(self._points)
        for start, end in pairwise(bounds[first:]):
            if start > bounds[first] and end - bounds[first] > tokens:
                break
            self._points.append(encode(self._tokens[start:end]))

    def _stored(self) -> EpisodeCache | None:
        """Return the episode's cache, if it is there and may stand for the history."""
        if self._scored or not self._is_divided:  # rows whose logits are wanted run
            return None
        return self._store.find((self._key, self._episode.number), EpisodeCache)

    # --- how it may run

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """See ``SequenceMethod``: what comes before the first eviction is exact KV.

        Rows that score keys run, since nothing is known of the queries of cached ones.
        """
        if self._stored() is not None:
            return 0
        block = self._method.rule.block
        first = min((int(self._budgets.min()) // block + 1) * block, self._history)
        run = WINDOW_ROWS if self._method.scorer == "window" else 1
        return min(limit, max(first - run, 0))

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
        """See ``SequenceMethod``: the scoring prompt's, then the next block's, in its place."""
        assert sequence.kv is not None
        first, end = sequence.kv.first, self.barrier(sequence)
        if self._patch_queries is not None:
            return sequence.computed - first + self._patch_room()
        if end is None:
            return sequence.length - first
        # The question's slots are there once the last block's are free.
        return max(end - first + self._patch_room(), sequence.length - self._history)

    def _room(self, length: int) -> int:
        """Return how many slots a block and its scoring take, and the question after it."""
        block = min(self._method.rule.block, self._history)
        return max(block + self._patch_room(), length - self._history)

    def _patch_room(self) -> int:
        """Return how many slots the prompt that scores keys takes, at most."""
        if self._is_divided:
            return len(self._episode.patch)
        return self._method.longest_patch(self._bounds)

    def prefill(self, sequence: SequenceView) -> Prefill:
        """See ``SequenceMethod``."""
        return "chunks"

    def barrier(self, sequence: SequenceView) -> int | None:
        """See ``SequenceMethod``: the end of the block."""
        if sequence.computed >= self._history:
            return None
        block = self._method.rule.block
        return min((sequence.computed // block + 1) * block, self._history)

    def atomic_tokens(self, computed: int) -> int:
        """See ``SequenceMethod``: a part of the prompt that scores keys, while it runs."""
        return 0 if self._patch_queries is None else _PART

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
        keys = self._state.eviction.keys(kv, point)
        seen = self._state.eviction.full_layers.keys(keys)
        if (seen.counts <= np.repeat(self._budgets, seen.config.kv_heads)).all():
            return self._keep(kv, keys, every_key(seen), point)
        if self._method.scorer in ("episode", "summary"):
            self._patch_queries = []  # what they say is decided about once they are there
            return True
        return self._keep(kv, keys, self._best(self._scores(seen, point)), point)

    def run_chunk(self, sequence: SequenceView, tokens: int) -> MethodChunk | None:
        """See ``SequenceMethod``: the next rows of the prompt that scores keys; then decide."""
        found, kv, point = self._patch_queries, sequence.kv, sequence.computed
        if found is None or kv is None:
            return None
        if not self._is_divided:
            self._embed(_READ_PER_ROW * tokens)
            if len(self._points) < len(self._bounds) - 1:
                return MethodChunk(0, point)
        patch, done = self._episode.patch, sum(queries.shape[1] for queries in found)
        rows = patch[done : done + tokens]
        found.append(self._run_patch(kv, point, done, rows))
        ran = MethodChunk(0, point, row_layers=len(rows) * self._state.runner.config.layers)
        if done + len(rows) < len(patch):
            return ran
        self._patch_queries = None
        eviction = self._state.eviction
        keys = eviction.keys(kv, point)
        seen = eviction.full_layers.keys(keys)
        queries = eviction.full_layers.queries(np.concatenate(found, axis=1))
        fits = self._keep(kv, keys, self._best(cached_scores(seen, queries)), point)
        return ran._replace(fits=fits)

    def _keep(self, kv: SequenceKV, keys: SequenceKeys, selection: Selection, point: int) -> bool:
        """Keep what is selected of the first ``point`` tokens; return whether there was room."""
        self._window = []
        self._state.counts.blocks += 1
        if not self._state.eviction.apply(kv, keys, selection, point):
            return False
        if point == self._history and not self._scored:
            self._save(kv)
        return True

    def _save(self, kv: SequenceKV) -> None:
        counts = self._state.counts
        cache = EpisodeCache.save(kv, self._state.runner.cells)
        self._store.keep((self._key, self._episode.number), cache)
        counts.parked_bytes = max(counts.parked_bytes, cache.nbytes)

    def shares_slots(self, is_compressed: bool) -> bool:
        """See ``SequenceMethod``: other answers load the cache, or compute it."""
        return False

    def restart(self) -> None:
        """See ``SequenceMethod``."""
        self._window, self._patch_queries = [], None

    def fork(self) -> "EpisodicSequence":
        """See ``SequenceMethod``."""
        return EpisodicSequence(
            self.name, self._method, self._state, self._tokens, self._parts, self._tenant,
            scored=self._scored,
        )  # fmt: skip

    # --- which keys stay

    def _best(self, scores: list[Float32Array]) -> Selection:
        """Return the selection of the keys with the best scores."""
        method = self._method
        always = method.always_kept(self._parts)
        return best_keys(scores, self._budgets, always, pooled=method.rule.pooled)

    def _scores(self, seen: SequenceKeys, point: int) -> list[Float32Array]:
        """Return the scores of a null, at the end of ``point`` tokens."""
        if self._method.scorer == "random":
            generator = np.random.default_rng([self._method.rule.seed, point])
            return [generator.random(count, np.float32) for count in seen.counts]
        rows = np.concatenate(self._window, axis=1)[:, -WINDOW_ROWS:]
        return window_scores(seen, self._state.eviction.full_layers.queries(rows))

    def _run_patch(self, kv: SequenceKV, point: int, done: int, rows: Int32Array) -> Float32Array:
        """Run rows of the prompt that scores keys, which stands behind the first ``point`` tokens.

        It lies in slots that nothing is computed in yet, and is forgotten.

        Args:
            kv: the sequence's.
            point: see above.
            done: how many of the prompt's rows come before these.
            rows: [n] int32, the tokens.

        Returns:
            Their queries, float32 [layers, rows, query_heads, head_dim].
        """
        runner = self._state.runner
        plan = None if kv.prefix is None else AttentionPlan(kv.prefix.index)
        slots = kv.slots[: point - kv.first + done + len(rows)]
        batch = _batch(rows, slots, point + done, plan, observed=True)
        runner.run_layers(batch, runner.embed(batch), 0, runner.config.layers)
        return runner.observed_queries(batch)


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
            scored=sequence.next_scored is not None and sequence.next_scored <= parts.history,
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
