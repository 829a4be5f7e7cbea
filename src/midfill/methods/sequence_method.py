"""SequenceMethod: what published methods do to one sequence, as the questions that the engine asks.

The engine names no kind of method. A sequence has one ``SequenceMethod``; one without methods has
``NO_METHOD``, whose answers are those of plain serving. Several methods on one request are a
``ComposedMethod``, where they can stand together: each says what it changes and what it needs to
find unchanged (``Aspect``).

A method changes nothing of the engine's: it answers, and what it answers is applied. Only the KV
that the sequence holds (``SequenceKV``) and the cells in it are moved by methods themselves, where
the engine asks for a decision.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from midfill.arrays import Float32Array, Int32Array
from midfill.errors import InvalidRequestError
from midfill.kv.branches import Branch
from midfill.kv.radix_cache import CachedPrefix, CacheRoot
from midfill.kv.sequence_kv import SequenceKV
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.layer_rows import LayerRows, RowChanges

Prefill = Literal["any", "layers", "chunks"]
"""How a prompt may be computed: all of it in one pass, layer by layer ("layers"), in chunks only
("chunks"), or as the scheduler likes ("any")."""


class SequenceView(Protocol):
    """What a method may look at of a sequence; the attributes are those of ``Sequence``."""

    @property
    def tenant(self) -> str: ...
    @property
    def tokens(self) -> Int32Array: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def computed(self) -> int: ...
    @property
    def checked_tokens(self) -> int: ...
    @property
    def may_be_empty(self) -> bool: ...
    @property
    def next_scored(self) -> int | None: ...
    @property
    def kv(self) -> SequenceKV | None: ...


class Aspect(Enum):
    """What methods change, or need to find as plain serving leaves it."""

    ROWS = "runs every token through every layer"
    CHUNKS = "computes prompts in chunks of any size"
    POSITIONS = "keeps tokens at the positions of their numbers"
    ROOT = "shares the tenant's exact KV"
    KEYS = "keeps the keys that it has computed"
    LISTS = "has a prompt's rows attend to all keys"
    READS = "has an answer's rows attend to all keys"


@dataclass(frozen=True)
class RequestFacts:
    """What a method may know of a request before it runs.

    Attributes:
        prompt: number of its tokens.
        compress_after: how many of these a method sees and compresses.
        contexts: see ``EngineRequest.contexts``.
        before_caret, after_caret: see ``EngineRequest``; [(start, end), ...].
        answers: how many are wanted.
        scores_prompt: whether log probabilities of the prompt's tokens are.
        token_ids: the prompt.
    """

    prompt: int
    compress_after: int
    contexts: tuple[int, ...] = ()
    before_caret: tuple[tuple[int, int], ...] = ()
    after_caret: tuple[tuple[int, int], ...] = ()
    answers: int = 1
    scores_prompt: bool = False
    token_ids: Sequence[int] = ()


class SequenceRows(NamedTuple):
    """What a sequence's rows in a step attend to.

    Attributes:
        positions: [rows] int32.
        kv_slots: [n] int32, which end with those of the rows.
        visible: [rows] int32, how many of these each row sees; None where the rows are those of
            the last slots.
        plan: what else they attend to; None if there is nothing to say.
    """

    positions: Int32Array
    kv_slots: Int32Array
    visible: Int32Array | None = None
    plan: AttentionPlan | None = None


class Admitted(NamedTuple):
    """What became of a sequence when it was admitted.

    Attributes:
        computed: how many of its first tokens have their KV now.
        copied: of how many KV was copied, as it would have been computed.
    """

    computed: int
    copied: int = 0


class MethodChunk(NamedTuple):
    """What a method did of a prefill by itself.

    Attributes:
        left: how many of the tokens that it was given are left to ordinary prefill.
        computed: how many of the sequence's first tokens have their KV now.
        reused: of how many prompt tokens KV from elsewhere is kept; counted when that has ended.
        row_layers: rows times layers that it ran.
        fits: whether there is room for what stays, where it has decided about the KV; see
            ``SequenceMethod.decide``. None: it hasn't.
    """

    left: int
    computed: int
    reused: int = 0
    row_layers: int = 0
    fits: bool | None = None


class SequenceMethod:
    """One method at work on one sequence. This base class does nothing: a null object.

    Attributes:
        name: how requests name it; for messages.
        title: what it is, for messages: "the method of compression".
        changes, needs: what can't stand beside a method that needs, or changes, the same.
    """

    name: str = "none"
    title: str = "the method"
    changes: frozenset[Aspect] = frozenset()
    needs: frozenset[Aspect] = frozenset()

    @property
    def is_null(self) -> bool:
        """Whether it does nothing."""
        return type(self) is SequenceMethod

    # --- what the prefix cache gives and gets

    def root(self, tenant: str) -> CacheRoot:
        """Return the prefix cache's tree that the sequence shares."""
        return tenant

    def cache_keys(self, tokens: Int32Array) -> Int32Array:
        """Return the keys of [n] int32 leading tokens in the prefix cache: n or fewer."""
        return tokens

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        """Return how many of the first ``limit`` tokens may come from the cache."""
        return limit

    def usable(self, cached: int) -> int:
        """Return how many of so many cached tokens can be used."""
        return cached

    def find_branch(
        self, sequence: SequenceView, tokens: Int32Array, exact: CachedPrefix
    ) -> tuple[Branch, CachedPrefix] | None:
        """Return KV behind an exact prefix that the sequence accepts, and what is cached with it.

        Args:
            sequence: a queued one.
            tokens: [n] int32, those that may come from the cache.
            exact: what the tree holds of them.
        """
        return None

    def found_elsewhere(self, sequence: SequenceView, cached: int) -> int:
        """Estimate how many tokens after ``cached`` a queued sequence will take from elsewhere."""
        return 0

    @property
    def is_private(self) -> bool:
        """Whether nothing of its KV may go to the cache."""
        return False

    # --- how it may run

    def slots_needed(self, length: int) -> int | None:
        """Return how many slots a sequence takes at its admission; None: one per uncached token."""
        return None

    def slots_ahead(self, sequence: SequenceView) -> int:
        """Return how many slots it holds while it is prefilled, after a decision about its KV.

        Those of compressed tokens don't count. Usually there is one for each of its other tokens.
        """
        assert sequence.kv is not None
        return sequence.length - sequence.kv.first

    def prefill(self, sequence: SequenceView) -> Prefill:
        """Return how its prompt may be computed."""
        return "any"

    def barrier(self, sequence: SequenceView) -> int | None:
        """Return the number of tokens that a step must not go beyond; None if there is none."""
        return None

    def atomic_tokens(self, computed: int) -> int:
        """Return how many tokens after ``computed`` run in one step or not at all; 0: any."""
        return 0

    def allows_draft(self, tokens: int) -> bool:
        """Return whether drafted tokens may follow in a step that runs ``tokens`` of its own."""
        return True

    # --- its rows in a step

    def row_changes(self, sequence: SequenceView, rows: LayerRows) -> RowChanges | None:
        """Begin a pass; return what changes its rows between layers, if anything does."""
        return None

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        """Return what the rows of the tokens first <= i < end attend to, given what they would."""
        return rows

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        """Return which rows of a step have their queries kept, counted from the first one.

        Args:
            sequence: it runs ``tokens`` of its known tokens, and ``drafted`` after them.
            tokens, drafted: see above.
        """
        return range(0)

    # --- what happens to it

    def admitted(self, sequence: SequenceView) -> Admitted:
        """Act on its admission: it holds slots, and nothing is evicted any more in this step."""
        return Admitted(sequence.computed)

    def run_chunk(self, sequence: SequenceView, tokens: int) -> MethodChunk | None:
        """Run a part of its prefill itself, worth so many tokens of work; None: it ran nothing."""
        return None

    def observe(self, first: int, queries: Float32Array) -> None:
        """Take the queries [layers, n, query_heads, head_dim] of observed rows, from token first
        on."""

    def committed(self, sequence: SequenceView) -> int:
        """Note that tokens are computed; return how many of the first have their KV."""
        return sequence.computed

    def decide(self, sequence: SequenceView) -> bool:
        """Decide what stays of its KV, if it has come to such a point.

        Returns:
            False if there is no room for what stays: it holds its slots as before, and has to be
            preempted.
        """
        return True

    def take_extra_rows(self) -> int:
        """Return how many rows it has run by itself in decisions since it was last asked."""
        return 0

    def rolled_back(self, computed: int) -> None:
        """Forget what was observed of tokens after the first ``computed``: wrong drafts."""

    def shares_slots(self, is_compressed: bool) -> bool:
        """Whether other answers to the prompt may go on with its slots, compressed or not."""
        return True

    def restart(self) -> None:
        """Begin again: the sequence holds no KV any more."""

    def after_preemption(self) -> "SequenceMethod":
        """Return the method that a preempted sequence goes on with."""
        return self

    def fork(self) -> "SequenceMethod":
        """Return the method for another answer to the same prompt, in the same state."""
        return self


NO_METHOD = SequenceMethod()


class ComposedMethod(SequenceMethod):
    """Several methods on one sequence.

    Args:
        methods: at least two, which can stand together (``compose``).
    """

    def __init__(self, methods: Sequence[SequenceMethod]) -> None:
        self.methods = tuple(methods)
        self.name = "+".join(method.name for method in self.methods)

    def root(self, tenant: str) -> CacheRoot:
        """See ``SequenceMethod.root``: at most one method has a tree of its own."""
        roots = [method.root(tenant) for method in self.methods]
        return next((root for root in roots if root != tenant), tenant)

    def cache_keys(self, tokens: Int32Array) -> Int32Array:
        for method in self.methods:
            tokens = method.cache_keys(tokens)
        return tokens

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        for method in self.methods:
            limit = method.reusable(sequence, limit)
        return limit

    def usable(self, cached: int) -> int:
        return min(method.usable(cached) for method in self.methods)

    def find_branch(
        self, sequence: SequenceView, tokens: Int32Array, exact: CachedPrefix
    ) -> tuple[Branch, CachedPrefix] | None:
        found = (method.find_branch(sequence, tokens, exact) for method in self.methods)
        return next((branch for branch in found if branch is not None), None)

    def found_elsewhere(self, sequence: SequenceView, cached: int) -> int:
        return max(method.found_elsewhere(sequence, cached) for method in self.methods)

    @property
    def is_private(self) -> bool:
        return any(method.is_private for method in self.methods)

    def slots_needed(self, length: int) -> int | None:
        return _largest(method.slots_needed(length) for method in self.methods)

    def slots_ahead(self, sequence: SequenceView) -> int:
        return min(method.slots_ahead(sequence) for method in self.methods)

    def prefill(self, sequence: SequenceView) -> Prefill:
        modes = {method.prefill(sequence) for method in self.methods}
        return next(mode for mode in ("layers", "chunks", "any") if mode in modes)

    def barrier(self, sequence: SequenceView) -> int | None:
        barriers = [method.barrier(sequence) for method in self.methods]
        return min((barrier for barrier in barriers if barrier is not None), default=None)

    def atomic_tokens(self, computed: int) -> int:
        return max(method.atomic_tokens(computed) for method in self.methods)

    def allows_draft(self, tokens: int) -> bool:
        return all(method.allows_draft(tokens) for method in self.methods)

    def row_changes(self, sequence: SequenceView, rows: LayerRows) -> RowChanges | None:
        changes = [method.row_changes(sequence, rows) for method in self.methods]
        return next((change for change in changes if change is not None), None)

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        for method in self.methods:
            rows = method.arrange(sequence, first, end, rows)
        return rows

    def observed_rows(self, sequence: SequenceView, tokens: int, drafted: int) -> range:
        ranges = [method.observed_rows(sequence, tokens, drafted) for method in self.methods]
        wanted = [rows for rows in ranges if rows]
        if not wanted:
            return range(0)
        return range(min(rows.start for rows in wanted), max(rows.stop for rows in wanted))

    def admitted(self, sequence: SequenceView) -> Admitted:
        results = [method.admitted(sequence) for method in self.methods]
        return Admitted(
            max(result.computed for result in results), sum(result.copied for result in results)
        )

    def run_chunk(self, sequence: SequenceView, tokens: int) -> MethodChunk | None:
        chunks = (method.run_chunk(sequence, tokens) for method in self.methods)
        return next((chunk for chunk in chunks if chunk is not None), None)

    def observe(self, first: int, queries: Float32Array) -> None:
        for method in self.methods:
            method.observe(first, queries)

    def committed(self, sequence: SequenceView) -> int:
        return max(method.committed(sequence) for method in self.methods)

    def decide(self, sequence: SequenceView) -> bool:
        return all(method.decide(sequence) for method in self.methods)

    def take_extra_rows(self) -> int:
        return sum(method.take_extra_rows() for method in self.methods)

    def rolled_back(self, computed: int) -> None:
        for method in self.methods:
            method.rolled_back(computed)

    def shares_slots(self, is_compressed: bool) -> bool:
        return all(method.shares_slots(is_compressed) for method in self.methods)

    def restart(self) -> None:
        for method in self.methods:
            method.restart()

    def after_preemption(self) -> SequenceMethod:
        return compose([method.after_preemption() for method in self.methods])

    def fork(self) -> SequenceMethod:
        return ComposedMethod([method.fork() for method in self.methods])


def compose(methods: Iterable[SequenceMethod]) -> SequenceMethod:
    """Return one method for several on one sequence.

    Raises:
        InvalidRequestError: two can't stand together; names both, and why.
    """
    working = [method for method in methods if not method.is_null]
    if len(working) < 2:
        return working[0] if working else NO_METHOD
    for place, method in enumerate(working):
        for other in working[place + 1 :]:
            _check_pair(method, other)
    return ComposedMethod(working)


class MethodKind(Protocol):
    """Puts methods of one kind to work; there is one object per engine."""

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """Put a method to work on a new sequence; None if it is of another kind, or does nothing.

        Args:
            name: how the request names it.
            method: the method.
            request: the sequence's.
            sequence: nothing of it is computed yet.

        Raises:
            InvalidRequestError: the request wants what the method can't do.
        """

    def max_length(self, methods: Sequence[object], request: RequestFacts, most: int) -> int:
        """Return how many tokens of a request, prompt and answer together, have positions.

        Args:
            methods: the request's, of this kind and others.
            request: see above.
            most: without methods of this kind.
        """

    def fitting_tokens(self, methods: Sequence[object], request: RequestFacts) -> int | None:
        """Return how many tokens of a request, prompt and answer together, fit the KV cache.

        Args:
            methods: the request's, of this kind and others.
            request: see above.

        Returns:
            None: as many as it has slots.
        """

    def longest_prompt(self, methods: Sequence[object], context: int) -> int | None:
        """Return how long a prompt may be that fits the cache, its answer's first token included.

        Args:
            methods: its request's, of this kind and others.
            context: how many positions the model has.

        Returns:
            None: as long as the cache has slots.
        """


class PlainLengths:
    """Lengths of kinds that don't change them; a base class."""

    def max_length(self, methods: Sequence[object], request: RequestFacts, most: int) -> int:
        """See ``MethodKind.max_length``."""
        return most

    def fitting_tokens(self, methods: Sequence[object], request: RequestFacts) -> int | None:
        """See ``MethodKind.fitting_tokens``."""
        return None

    def longest_prompt(self, methods: Sequence[object], context: int) -> int | None:
        """See ``MethodKind.longest_prompt``."""
        return None


def _check_pair(method: SequenceMethod, other: SequenceMethod) -> None:
    for first, second in ((method, other), (other, method)):
        shared = first.changes & (second.needs | second.changes)
        if shared:
            aspect = min(shared, key=list(Aspect).index)
            raise InvalidRequestError(
                f"{method.name} and {other.name} can't stand together: {second.name} relies on"
                f" serving that {aspect.value}, and {first.name} changes that",
                param="method",
            )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
