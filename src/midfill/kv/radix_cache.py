"""RadixCache: finds the slots of cached KV by the tokens that it was computed from.

A token-granular radix tree per tenant, after SGLang's RadixAttention (Zheng et al., "SGLang:
Efficient Execution of Structured Language Model Programs", 2024, arXiv 2312.07104). It differs in
two ways: nodes split and shrink at any token, so eviction frees exactly as many slots as are
missing; and each tenant has a root of its own, so no tenant can observe another's cache. KV that
is not exact has further roots (``kv.branches``).
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from midfill.arrays import Int32Array

_EMPTY: Int32Array = np.empty(0, dtype=np.int32)


class BranchRoot(NamedTuple):
    """Names a tree beside a tenant's own, see ``kv.branches``.

    Attributes:
        tenant: whose it is.
        variant: how its KV was made.
        number: tells branches apart.
    """

    tenant: str
    variant: Hashable
    number: int


class MethodRoot(NamedTuple):
    """Names a tree of KV that was computed under a method of sparse prefill.

    Attributes:
        tenant: whose it is.
        variant: names the method with its options.
    """

    tenant: str
    variant: str


CacheRoot = str | BranchRoot | MethodRoot
"""Names a tree: a tenant's own by the tenant."""


class RadixNode:
    """A run of tokens with the slots of their KV; opaque to users of the cache.

    A node is a handle for the whole path from the root to the node's end. When a node is split,
    the existing object becomes the lower part, so handles stay valid.
    """

    __slots__ = (
        "children",
        "last_used",
        "locks",
        "low_priority",
        "parent",
        "queued",
        "root",
        "slots",
        "tokens",
    )

    def __init__(
        self, root: CacheRoot, parent: "RadixNode | None", tokens: Int32Array, slots: Int32Array
    ) -> None:
        self.root = root
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, RadixNode] = {}
        self.locks = 0
        self.last_used = 0
        self.low_priority = False
        self.queued = False

    @property
    def evictable_leaf(self) -> bool:
        """Whether the node's last tokens may be evicted now."""
        return not self.locks and not self.children and self.parent is not None


@dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix of a token sequence.

    Attributes:
        slots: [length] int32, the slots of its KV in order of position.
        node: handle of the path, to be locked; None if nothing matched.
    """

    slots: Int32Array
    node: RadixNode | None

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class Insertion:
    """The result of an insertion.

    Attributes:
        slots: [length] int32, the slots in which the cache holds the tokens' KV.
        node: handle of the whole path; None for no tokens.
        duplicates: [n] int32, offered slots whose positions were cached in other slots already.
            The caller still owns them and has to free them.
    """

    slots: Int32Array
    node: RadixNode | None
    duplicates: Int32Array


class CachedPrefix(NamedTuple):
    """How much of a token sequence is cached.

    Attributes:
        tokens: length of the cached prefix.
        evictable: how many of its tokens are not locked.
    """

    tokens: int
    evictable: int


class CacheWatcher(Protocol):
    """Follows what the cache holds."""

    def added(self, root: CacheRoot, tokens: Int32Array, slots: Int32Array, after: int) -> None:
        """Note tokens that are cached now.

        Args:
            root: of their tree.
            tokens, slots: [n] int32, at least one.
            after: slot of the token before the first one; -1 if there is none.
        """

    def removed(self, slots: Int32Array) -> None:
        """Note that [n] int32 ``slots`` are evicted; what came after them is, too."""


class RadixCache:
    """Prefix cache over slots: match, lock, insert, evict. Owns every slot it holds.

    A locked path is never evicted. Everything else is evicted least recently used first, from the
    leaves up; what only offline requests have used (``low_priority``) before all that others have.
    Match and insert cost one numpy comparison per node on the path, evict O(log nodes) per node
    touched.

    Attributes:
        cached_tokens: number of slots held.
        evictable_tokens: how many of them are not locked.
        evicted_tokens: number of slots evicted since the start.
        nodes: number of runs of tokens that the trees consist of, roots not counted.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self.nodes = 0
        self.cached_tokens = 0
        self.evictable_tokens = 0
        self.evicted_tokens = 0
        self._roots: dict[CacheRoot, RadixNode] = {}
        self._clock = 0
        # Heap of (whether others than offline requests have used it, last use, push number, node)
        # for evictable leaves. Entries may be stale, which ``evict`` checks. A node has at most one
        # entry (``queued``), so the heap is no larger than the tree.
        self._queue: list[tuple[bool, int, int, RadixNode]] = []
        self._pushes = 0
        self._watchers: list[CacheWatcher] = []

    @property
    def tenants(self) -> int:
        """Number of tenants with cached tokens."""
        return len({_tenant_of(root) for root in self._roots})

    def match(
        self, root: CacheRoot, tokens: Int32Array, *, low_priority: bool = False
    ) -> PrefixMatch:
        """Find the longest cached prefix of [n] int32 ``tokens`` and mark it as just used.

        Args:
            root: which tree to use.
            tokens: the sequence's tokens from position 0.
            low_priority: whether its use keeps nothing from being evicted first.
        """
        path, common = self._descend(root, tokens)
        if not path:
            return PrefixMatch(_EMPTY, None)
        node = path[-1]
        if common < len(node.tokens):
            node = path[-1] = self._split(node, common)
        self._clock += 1
        for visited in path:
            visited.last_used = self._clock
            visited.low_priority = visited.low_priority and low_priority
        return PrefixMatch(np.concatenate([visited.slots for visited in path]), node)

    def peek(self, root: CacheRoot, tokens: Int32Array) -> CachedPrefix:
        """Return how much ``match`` would find; changes nothing, not even the order of use."""
        path, common = self._descend(root, tokens)
        matched = evictable = 0
        for node in path:
            length = common if node is path[-1] else len(node.tokens)
            matched += length
            evictable += 0 if node.locks else length
        return CachedPrefix(matched, evictable)

    def find(self, root: CacheRoot, tokens: Int32Array) -> Int32Array:
        """Return the slots of the longest cached prefix of ``tokens``: [n] int32; changes nothing.

        They are not locked, so they are the tokens' until the next call that may evict.
        """
        path, common = self._descend(root, tokens)
        if not path:
            return _EMPTY
        return np.concatenate([*(node.slots for node in path[:-1]), path[-1].slots[:common]])

    def watch(self, watcher: CacheWatcher) -> None:
        """Tell ``watcher`` what is cached, and from now on whatever is cached and evicted."""
        self._watchers.append(watcher)
        stack = [(node, -1) for root in self._roots.values() for node in root.children.values()]
        while stack:
            node, after = stack.pop()
            watcher.added(node.root, node.tokens, node.slots, after)
            stack += ((child, int(node.slots[-1])) for child in node.children.values())

    def insert(
        self,
        root: CacheRoot,
        tokens: Int32Array,
        slots: Int32Array,
        held: RadixNode | None = None,
        *,
        low_priority: bool = False,
    ) -> Insertion:
        """Cache the KV in [n] int32 ``slots`` of [n] int32 ``tokens``.

        The cache takes over the slots of positions that it doesn't hold yet. Offered slots that it
        holds already (those that the caller matched before) stay as they are. Nothing is locked: a
        caller that continues to use the path has to lock the returned node.

        Args:
            root: which tree to use.
            tokens: the sequence's tokens from position 0.
            slots: the slot of each token's KV.
            held: the path that the caller has locked. If nobody else has, and it ends at a leaf,
                the leaf grows in place instead of getting a child, so a prompt that is inserted
                chunk by chunk stays one node. The caller's lock then covers the new tokens too.
            low_priority: whether what is new is evicted before all that others have used.
        """
        found = self.match(root, tokens, low_priority=low_priority)
        known = len(found)
        offered = slots[:known]
        duplicates = offered[offered != found.slots]
        if known == len(tokens):
            return Insertion(found.slots, found.node, duplicates)

        tail, tail_slots = tokens[known:].copy(), slots[known:].copy()
        parent = found.node
        self.cached_tokens += len(tail)
        grows = parent is held and parent is not None and parent.low_priority == low_priority
        if parent is not None and grows and parent.locks == 1 and not parent.children:
            parent.tokens = np.concatenate((parent.tokens, tail))
            parent.slots = np.concatenate((parent.slots, tail_slots))
            node = parent
        else:
            node = self._add_child(root, parent, tail, tail_slots, low_priority)
            self.evictable_tokens += len(tail)
        for watcher in self._watchers:
            watcher.added(root, tail, tail_slots, int(found.slots[-1]) if known else -1)
        return Insertion(np.concatenate((found.slots, tail_slots)), node, duplicates)

    def lock(self, node: RadixNode | None) -> None:
        """Add a lock to the path that ends at ``node``; a locked path is not evicted."""
        while node is not None:
            if node.locks == 0:
                self.evictable_tokens -= len(node.tokens)
            node.locks += 1
            node = node.parent

    def unlock(self, node: RadixNode | None) -> None:
        """Remove one lock from the path that ends at ``node``.

        Raises:
            ValueError: the path is not locked.
        """
        leaf = node
        while node is not None:
            if node.locks == 0:
                raise ValueError("a path that is not locked was unlocked")
            node.locks -= 1
            if node.locks == 0:
                self.evictable_tokens += len(node.tokens)
            node = node.parent
        if leaf is not None:
            self._enqueue(leaf)

    def released_by(self, nodes: Iterable[RadixNode | None]) -> int:
        """Return how many tokens become evictable if each of ``nodes`` is unlocked once."""
        unlocks: Counter[RadixNode] = Counter()
        for node in nodes:
            while node is not None:
                unlocks[node] += 1
                node = node.parent
        return sum(len(node.tokens) for node, count in unlocks.items() if node.locks == count)

    def evict(self, count: int) -> Int32Array:
        """Evict ``count`` tokens, at most the evictable ones; return their slots as [n] int32.

        The caller owns the slots. The least recently used leaf, of low priority if there is any,
        shrinks from its end until it is removed, then the next one does.
        """
        taken: list[Int32Array] = []
        missing = min(count, self.evictable_tokens)
        self.evictable_tokens -= missing
        self.cached_tokens -= missing
        self.evicted_tokens += missing
        while missing:
            _, stamp, _, node = heapq.heappop(self._queue)
            node.queued = False
            if not node.evictable_leaf:
                continue  # it is queued again when it becomes evictable
            if node.last_used != stamp:
                self._enqueue(node)
                continue
            keep = len(node.tokens) - min(missing, len(node.tokens))
            taken.append(node.slots[keep:])
            missing -= len(node.tokens) - keep
            if keep:
                node.tokens, node.slots = _head(node.tokens, keep), _head(node.slots, keep)
                self._enqueue(node)
            else:
                self._remove(node)
        for watcher in self._watchers:
            for slots in taken:
                watcher.removed(slots)
        return np.concatenate(taken) if taken else _EMPTY

    def evict_leaf(self) -> Int32Array:
        """Evict the whole of the leaf that ``evict`` begins with; return its slots as [n] int32.

        The caller owns the slots; there are none if everything is locked.
        """
        while self._queue:
            _, stamp, _, node = self._queue[0]
            if node.evictable_leaf and node.last_used == stamp:
                return self.evict(len(node.tokens))
            heapq.heappop(self._queue)
            node.queued = False
            self._enqueue(node)
        return _EMPTY

    def _descend(self, root: CacheRoot, tokens: Int32Array) -> tuple[list[RadixNode], int]:
        """Return the nodes on the path of ``tokens`` and how much of the last one matches."""
        path: list[RadixNode] = []
        node = self._roots.get(root)
        if node is None or not len(tokens):
            return path, 0
        data = tokens.tobytes()
        done, common = 0, 0
        while done < len(tokens):
            node = node.children.get(int(tokens[done]))
            if node is None:
                break
            path.append(node)
            common = len(node.tokens)
            # Most nodes on a path match whole, which bytes tell several times faster than NumPy.
            if not data.startswith(node.tokens.tobytes(), done * tokens.itemsize):
                common = _common_prefix(node.tokens, tokens[done:])
            done += common
            if common < len(node.tokens):
                break
        return path, common

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Split ``node`` after ``length`` tokens; return the new upper part."""
        parent = node.parent
        assert parent is not None
        tokens, slots = node.tokens, node.slots
        upper = RadixNode(node.root, parent, tokens[:length].copy(), slots[:length].copy())
        upper.locks, upper.low_priority = node.locks, node.low_priority
        parent.children[int(upper.tokens[0])] = upper
        self.nodes += 1
        node.tokens, node.slots = tokens[length:].copy(), slots[length:].copy()
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _add_child(
        self,
        root: CacheRoot,
        parent: RadixNode | None,
        tokens: Int32Array,
        slots: Int32Array,
        low_priority: bool,
    ) -> RadixNode:
        if parent is None:
            parent = self._roots.get(root)
        if parent is None:
            parent = self._roots[root] = RadixNode(root, None, _EMPTY, _EMPTY)
        node = RadixNode(root, parent, tokens, slots)
        self.nodes += 1
        self._clock += 1
        node.last_used, node.low_priority = self._clock, low_priority
        parent.children[int(tokens[0])] = node
        self._enqueue(node)
        return node

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.tokens[0])]
        self.nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[parent.root]
        else:
            self._enqueue(parent)

    def _enqueue(self, node: RadixNode) -> None:
        """Add a node to the eviction queue if it is an evictable leaf that is not in it."""
        if node.evictable_leaf and not node.queued:
            node.queued = True
            self._pushes += 1
            heapq.heappush(self._queue, (not node.low_priority, node.last_used, self._pushes, node))


def _tenant_of(root: CacheRoot) -> str:
    return root if isinstance(root, str) else root.tenant


def _common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Return how many leading tokens two arrays have in common."""
    span = min(len(a), len(b))
    differs = a[:span] != b[:span]
    first = int(differs.argmax()) if span else 0
    return first if span and differs[first] else span


def _head(array: Int32Array, length: int) -> Int32Array:
    """Return the first ``length`` elements: a view, unless it would keep twice the memory alive."""
    view = array[:length]
    owner = view.base
    return view if owner is None or len(owner) <= 2 * length else view.copy()
