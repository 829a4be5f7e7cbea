"""RequestQueues: which sequences run, wait or are background work, and the KV slots they hold."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from midfill.arrays import Int32Array
from midfill.engine.request import EngineOutput, FinishReason
from midfill.engine.scheduling.policies.deficit_round_robin import DeficitRoundRobin
from midfill.engine.scheduling.policies.snapshot_policy import SnapshotPolicy
from midfill.engine.scheduling.scheduler import RunningSequence, ScheduleState, WaitingSequence
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.sequences.waiting_queue import WaitingQueue
from midfill.kv.branches import Branch
from midfill.kv.pool import KVPool
from midfill.kv.radix_cache import CachedPrefix
from midfill.kv.sequence_kv import SequenceKV
from midfill.kv.state_pool import StateStore


class RequestQueues:
    """All unfinished sequences of an engine, and the KV pool.

    KV that a sequence has computed stays in the prefix cache when the sequence releases it;
    ``discard`` is the exception.

    Attributes:
        pool: the KV slots.
        sequences: all sequences by id.
        running: sequences that hold slots, in order of arrival.
        waiting: the queue: what has run before, then what is new, tenants in turn.
        background: prompts to be cached when the engine is idle, oldest first.
        loading: new sequences whose KV is on its way to the cache, in order of arrival.
        on_release: called with a sequence before it leaves its KV to the cache.
    """

    def __init__(
        self,
        slots: int,
        max_running: int,
        lookahead: int = 0,
        states: StateStore | None = None,
    ) -> None:
        """Create empty queues.

        Args:
            slots: size of the KV pool in tokens.
            max_running: maximum number of sequences that hold slots at a time.
            lookahead: how many queued sequences a policy sees at least, even if fewer could be
                admitted, so that it can choose among them.
            states: the runner's; None for models without.
        """
        self.pool = KVPool(slots, states)
        self._snapshots = SnapshotPolicy()
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(DeficitRoundRobin())
        self.background: deque[Sequence] = deque()
        self.loading: list[Sequence] = []
        self.on_release: Callable[[Sequence], None] = lambda sequence: None
        self._max_running = max_running
        self._lookahead = lookahead
        self._sequence_ids: dict[str, set[int]] = {}

    def __bool__(self) -> bool:
        """Whether any sequence is running, waiting or background work."""
        return bool(self.sequences)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has unfinished answers."""
        return request_id in self._sequence_ids

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Return the unfinished sequences of a request, in order of arrival."""
        return [
            self.sequences[sequence_id]
            for sequence_id in sorted(self._sequence_ids.get(request_id, ()))
        ]

    def state(self, now: float = 0.0) -> ScheduleState:
        """Return what a policy may look at.

        Of the queue, these are as many sequences as a step could admit, or as ``lookahead`` says.

        Args:
            now: the time, on the clock by which sequences have arrived.
        """
        places = self._max_running - len(self.running)
        return ScheduleState(
            running=tuple(_running(sequence) for sequence in self.running),
            waiting=self._queued(self.waiting.head(places, self._lookahead)),
            available_slots=self.pool.available,
            cache=_QueueCacheView(self.pool, self.sequences),
            background=self._queued(self.background),
            now=now,
            total_slots=self.pool.slots.total,
        )

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence to its queue."""
        self._register(sequence)
        (self.background if sequence.background else self.waiting).append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Keep a new sequence from being admitted until its KV is loaded."""
        self._register(sequence)
        self.loading.append(sequence)

    def queue_loaded(self, is_loading: Callable[[Sequence], bool]) -> None:
        """Queue the sequences whose KV is loaded, where they would be if they had never waited."""
        loaded = [sequence for sequence in self.loading if not is_loading(sequence)]
        for sequence in loaded:
            self.loading.remove(sequence)
            self.waiting.insert(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones and match its prefix in the cache."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=_arrival)
        sequence.decoding = False
        self.match_prefix(sequence)

    def match_prefix(self, sequence: Sequence) -> None:
        """Let a sequence that holds no slots share its longest cached prefix."""
        found = look_up(sequence, self.pool)
        method, root = sequence.method, sequence.cache_root
        capacity = sequence.max_length + (method.slots_needed(sequence.length) or 0)
        kv = sequence.kv = SequenceKV(
            self.pool,
            root,
            capacity,
            is_private=method.is_private,
            low_priority=sequence.hints.offline,
        )
        sequence.reused_tokens = 0
        if found.branch is None:
            sequence.computed = kv.match_prefix(found.tokens)
            sequence.reused_tokens = sequence.computed if sequence.loaded_variant else 0
        else:
            sequence.computed = kv.match_branch(found.tokens, found.branch)
            sequence.reused_tokens = sequence.computed - kv.base
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed - sequence.reused_tokens
        if self.pool.states is not None:
            sequence.snapshots = self._snapshots.positions(
                sequence.length, sequence.computed, found.known, sequence.head_tokens
            )

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the head of the queue and release its slots."""
        self.running.remove(sequence)
        self.release(sequence)
        self.waiting.resume([sequence])

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's slots; the KV it has computed stays cached."""
        if sequence.kv is not None:
            self.on_release(sequence)
            # Of an answer all but the last token is computed, when it ends.
            is_passing = sequence.computed < sequence.length - 1
            sequence.kv.release(sequence.cache_keys(sequence.computed), is_passing=is_passing)
        sequence.forget_kv()

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence; the KV it has computed stays cached."""
        self._remove(sequence)
        self.release(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence whose KV may be wrong; KV that is not in the cache yet is lost."""
        self._remove(sequence)
        if sequence.kv is not None:
            sequence.kv.discard()
        sequence.forget_kv()

    def end(self, sequence: Sequence, reason: FinishReason) -> list[EngineOutput]:
        """Finish a sequence; return the last outputs of all answers that it stands for."""
        outputs = sequence.final_outputs(reason)
        self.finish(sequence)
        return outputs

    def fail(self, sequences: SequenceOf[Sequence], error: str) -> list[EngineOutput]:
        """Discard sequences; return the last outputs of all their answers."""
        outputs: list[EngineOutput] = []
        for sequence in sequences:
            outputs += sequence.final_outputs("error", error)
            self.discard(sequence)
        return outputs

    def start_siblings(self, siblings: SequenceOf[Sequence]) -> None:
        """Start a request's other answers on the KV of the first.

        Those beyond the maximum of running sequences go to the head of the queue, and so do all
        where the method doesn't let them share slots.

        Args:
            siblings: the result of ``Sequence.fork``.
        """
        first, *others = siblings
        first.answer_indices = first.answer_indices[:1]
        places = max(self._max_running - len(self.running), 0)
        if not first.method.shares_slots(first.held.prefix is not None):
            places = 0
        for other in others:
            self._register(other)
        for other in others[:places]:
            other.kv = first.held.fork()
            other.computed = first.computed
            other.method = first.method.fork()
            self.running.append(other)
        self.running.sort(key=_arrival)
        self.waiting.resume(others[places:])

    def _queued(self, sequences: Iterable[Sequence]) -> tuple[WaitingSequence, ...]:
        return tuple(
            WaitingSequence(
                sequence.sequence_id,
                sequence.length,
                # A state has seen its tokens in all layers, so it can only be kept between chunks.
                sequence.prefill if self.pool.states is None else "chunks",
                self._next_chunk(sequence),
                sequence.method.slots_needed(sequence.length),
                sequence.tenant,
                sequence.arrived,
                sequence.cached_tokens is not None,
                sequence.hints,
            )
            for sequence in sequences
        )

    def _next_chunk(self, sequence: Sequence) -> int:
        """Return how many tokens a queued sequence runs first in one step; 0: any number."""
        method = sequence.method
        return (
            0 if method.is_null else method.atomic_tokens(len(look_up(sequence, self.pool).tokens))
        )

    def _register(self, sequence: Sequence) -> None:
        self.sequences[sequence.sequence_id] = sequence
        self._sequence_ids.setdefault(sequence.request_id, set()).add(sequence.sequence_id)

    def _remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and from the index."""
        if sequence.background:
            self.background.remove(sequence)
        elif sequence.kv is not None:
            self.running.remove(sequence)
        elif sequence in self.loading:
            self.loading.remove(sequence)
        else:
            self.waiting.remove(sequence)
        del self.sequences[sequence.sequence_id]
        siblings = self._sequence_ids[sequence.request_id]
        siblings.remove(sequence.sequence_id)
        if not siblings:
            del self._sequence_ids[sequence.request_id]


class _QueueCacheView:
    """Implements ``scheduler.CacheView`` for the sequences in the queues; changes nothing.

    It is of one step: what policies ask several times is looked up once.
    """

    def __init__(self, pool: KVPool, sequences: Mapping[int, Sequence]) -> None:
        self._pool = pool
        self._sequences = sequences
        self._found: dict[int, CachedPrefix] = {}

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        """See ``CacheView.cached_prefix``."""
        found = self._found.get(sequence_id)
        if found is None:
            sequence = self._sequences[sequence_id]
            found = self._found[sequence_id] = look_up(sequence, self._pool).cached
        return found

    def found_elsewhere(self, sequence_id: int) -> int:
        """See ``CacheView.found_elsewhere``."""
        sequence = self._sequences[sequence_id]
        if sequence.method.is_null:
            return 0
        cached = self.cached_prefix(sequence_id).tokens
        return sequence.method.found_elsewhere(sequence, cached)

    def common_prefix(self, first: int, second: int) -> int:
        """See ``CacheView.common_prefix``."""
        a, b = self._sequences[first], self._sequences[second]
        if a.cache_root != b.cache_root or b.method.is_private:
            return 0
        span = min(len(a.matchable_tokens), b.length)
        differs = a.tokens[:span] != b.tokens[:span]
        position = int(differs.argmax()) if span else 0
        common = position if span and differs[position] else span
        return len(a.cache_keys(common))

    def released_by(self, victims: SequenceOf[int]) -> int:
        """See ``CacheView.released_by``."""
        held = [kv for victim in victims if (kv := self._sequences[victim].kv) is not None]
        owned = sum(kv.owned for kv in held)
        return owned + self._pool.cache.released_by(node for kv in held for node in kv.nodes)


def _arrival(sequence: Sequence) -> int:
    return sequence.sequence_id


def _running(sequence: Sequence) -> RunningSequence:
    rows = sequence.layer_rows
    return RunningSequence(
        sequence.sequence_id,
        sequence.length,
        sequence.computed,
        sequence.decoding,
        sequence.by_layers,
        sequence.prefill == "layers",
        0 if rows is None else rows.tokens,
        0 if rows is None else rows.next_layer,
        sequence.method.atomic_tokens(sequence.computed),
        sequence.arrived,
        sequence.hints,
    )


class FoundPrefix(NamedTuple):
    """What the prefix cache holds for a queued sequence.

    Attributes:
        tokens: [n] int32, those whose KV may come from it, a view.
        cached: how much of it there is.
        branch: KV that isn't exact, which the sequence continues; mostly None.
        known: how many tokens have KV in the cache; more than ``cached`` says where states are
            needed, too, and the last snapshot comes before.
    """

    tokens: Int32Array
    cached: CachedPrefix
    branch: Branch | None = None
    known: int = 0


def look_up(sequence: Sequence, pool: KVPool) -> FoundPrefix:
    """Return what a queued sequence would find in the cache; changes nothing."""
    tokens, root, method = sequence.matchable_tokens, sequence.cache_root, sequence.method
    if pool.states is not None:
        slots = pool.cache.find(root, tokens)
        tokens = tokens[: pool.states.deepest(slots)]
        return FoundPrefix(tokens, pool.cache.peek(root, tokens), known=len(slots))
    exact = pool.cache.peek(root, tokens)
    if method.is_null:
        return FoundPrefix(tokens, exact)
    usable = method.usable(exact.tokens)
    if usable < exact.tokens:
        tokens = tokens[:usable]
        exact = pool.cache.peek(root, tokens)
    found = method.find_branch(sequence, tokens, exact)
    return FoundPrefix(tokens, exact) if found is None else FoundPrefix(tokens, found[1], found[0])
