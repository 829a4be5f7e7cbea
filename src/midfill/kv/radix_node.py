"""The roots and nodes of the prefix cache's trees."""

from collections.abc import Hashable
from typing import NamedTuple

from midfill.arrays import Int32Array


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

    __slots__ = ("children", "last_used", "locks", "parent", "queued", "root", "slots", "tokens")

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
        self.queued = False

    @property
    def evictable_leaf(self) -> bool:
        """Whether the node's last tokens may be evicted now."""
        return not self.locks and not self.children and self.parent is not None
