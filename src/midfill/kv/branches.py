"""Branches: KV that is not what its tokens give by themselves, behind prefixes that are exact.

KV that was copied from another context is worth keeping for the next keystroke, but must not be
found by anyone who expects exact KV. So it lies in a tree of its own beside the tenant's, one per
prompt that was blended, and only sequences that accept such KV look there.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from midfill.arrays import Int32Array
from midfill.kv.radix_cache import BranchRoot, CachedPrefix, RadixCache

_MAX_BRANCHES = 64


class Branch(NamedTuple):
    """A tree that continues an exact prefix.

    Attributes:
        root: of the tree.
        base: [n] int32, the exact prefix.
    """

    root: BranchRoot
    base: Int32Array


class Branches:
    """The branches of all tenants; the oldest are forgotten. Their KV is the cache's.

    Args:
        cache: where branches and exact prefixes lie.
    """

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._branches: OrderedDict[BranchRoot, Branch] = OrderedDict()
        self._next = 0

    def start(self, tenant: str, variant: Hashable, base: Int32Array) -> Branch:
        """Return a new, empty branch after [n] int32 ``base``.

        Args:
            tenant: whose it is.
            variant: how its KV will be made.
            base: an exact prefix.
        """
        self._next += 1
        branch = Branch(BranchRoot(tenant, variant, self._next), base.copy())
        self._branches[branch.root] = branch
        if len(self._branches) > _MAX_BRANCHES:
            self._branches.popitem(last=False)
        return branch

    def find(
        self, tenant: str, variant: Hashable, tokens: Int32Array, exact: CachedPrefix
    ) -> tuple[Branch, CachedPrefix] | None:
        """Return the branch that leaves far fewer tokens to compute than the exact prefix.

        Changes nothing. A branch counts if it leaves at most a quarter of the tokens that the exact
        prefix leaves: what was typed after a prompt that was blended, not another such prompt.

        Args:
            tenant: whose branches to search.
            variant: how their KV was made.
            tokens: [n] int32, those that may come from the cache.
            exact: what the tenant's own tree holds of them.

        Returns:
            The branch, and what is cached of ``tokens`` with it; None if there is none.
        """
        best: tuple[Branch, CachedPrefix] | None = None
        most = exact.tokens + 3 * (len(tokens) - exact.tokens) // 4
        for branch in reversed(self._branches.values()):
            start = len(branch.base)
            if (branch.root.tenant, branch.root.variant) != (tenant, variant):
                continue
            if start > exact.tokens:
                continue
            if (tokens[:start] != branch.base).any():
                continue
            found = self._cache.peek(branch.root, tokens[start:])
            if found.tokens and start + found.tokens > most:
                most = start + found.tokens
                evictable = self._cache.peek(tenant, branch.base).evictable + found.evictable
                best = branch, CachedPrefix(most, evictable)
        return best
