"""Prefix groups: which prompts of a batch share a prefix, and in which order to run them.

Source: Zheng et al., "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing
and Throughput-oriented Token Batching", arXiv 2412.03594, sections 4.1 to 4.3.

All prompts are known beforehand, so their shared prefixes are found at once, in a compact radix
tree. Sharing is then made single-level: each prompt is the prefix of its group and a rest of its
own. A group's prefix is computed once if its members run together, and is needed no more after
them. Groups that generate much for few prompt tokens come first, so that the long prompts of later
ones fill the steps in which these decode.

This module is pure: numbers in, numbers out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from midfill.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Prompts that run together.

    Attributes:
        prefix: how many tokens they all begin with and share; 0 for a single prompt.
        members: their numbers, in lexical order of their tokens, so that those that share more
            than the prefix are neighbours.
    """

    prefix: int
    members: tuple[int, ...]

    @property
    def saving(self) -> int:
        """Tokens that need not be computed because the prefix is shared."""
        return (len(self.members) - 1) * self.prefix


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A node of the compact radix tree.

    Attributes:
        depth: tokens from the root to its end.
        ends: numbers of the prompts that end here.
        children: nodes below.
        leaves: how many prompts end here or below.
        first: where the first of them stands in lexical order.
    """

    depth: int
    ends: list[int] = field(default_factory=list)
    children: list["PrefixNode"] = field(default_factory=list)
    leaves: int = 0
    first: int = 0

    def walk(self) -> "Iterator[PrefixNode]":
        """Yield this node and all below, each before its children."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.children)

    def prompts(self) -> list[int]:
        """Return the numbers of the prompts that end here or below, in lexical order."""
        nodes = sorted((node for node in self.walk() if node.ends), key=lambda node: node.first)
        return [number for node in nodes for number in node.ends]


def build_prefix_tree(prompts: Sequence[Int32Array]) -> PrefixNode:
    """Return the compact radix tree over token sequences; its root has depth 0.

    Sorting puts sequences that share a prefix beside each other, so the tree follows from the
    common prefixes of neighbours: O(total tokens) beside the sort.

    Args:
        prompts: [n] int32 each, ids of at least 0; may be empty, and equal.
    """
    # Compared as bytes, big-endian numbers are in the order of the numbers.
    keys = [prompt.astype(">i4").tobytes() for prompt in prompts]
    order = sorted(range(len(prompts)), key=keys.__getitem__)
    root = PrefixNode(0)
    path = [root]  # from the root to the last prompt's node
    for place, number in enumerate(order):
        prompt = prompts[number]
        common = _common_prefix(prompts[order[place - 1]], prompt) if place else 0
        below: PrefixNode | None = None
        while path[-1].depth > common:
            below = path.pop()
        if below is not None and path[-1].depth < common:  # the branch is inside an edge
            fork = PrefixNode(common, children=[below], first=below.first)
            path[-1].children[-1] = fork
            path.append(fork)
        if path[-1].depth < len(prompt):
            node = PrefixNode(len(prompt), first=place)
            path[-1].children.append(node)
            path.append(node)
        path[-1].ends.append(number)
    for node in reversed(list(root.walk())):
        node.leaves = len(node.ends) + sum(child.leaves for child in node.children)
    return root


def find_prefix_groups(prompts: Sequence[Int32Array]) -> list[PrefixGroup]:
    """Return groups with much shared; each prompt is in exactly one.

    The last token of a prompt is never shared: its logits give the first token of the answer.

    Args:
        prompts: [n] int32 each, at least one token.
    """
    root = build_prefix_tree([prompt[:-1] for prompt in prompts])
    maximize_reuse(root)
    groups = [PrefixGroup(0, (number,)) for number in root.ends]
    for node in root.children:
        members = tuple(node.prompts())
        groups.append(PrefixGroup(node.depth if len(members) > 1 else 0, members))
    return groups


def maximize_reuse(root: PrefixNode) -> None:
    """Attach nodes to the root where prompts share more by themselves (the paper's MaximizeReuse).

    A node g below a child c of a node leaves it if the tokens that its prompts share below c, for
    all but one of them, are more than those of c, which are then computed once more.

    Args:
        root: changed in place; afterwards its children are the groups.
    """
    for node in reversed(list(root.walk())):  # children first
        for child in list(node.children):
            _detach(node, child)
        node.children = [child for child in node.children if child.leaves]


def _detach(node: PrefixNode, child: PrefixNode) -> None:
    """Move grandchildren of a node from its child to itself where that saves tokens."""
    length = child.depth - node.depth
    candidates = [each for each in child.children if each.leaves > 1]
    candidates.sort(key=lambda each: (each.leaves - 1) * (each.depth - child.depth), reverse=True)
    for grandchild in candidates:
        gain = (grandchild.leaves - 1) * (grandchild.depth - child.depth)
        cost = 0 if grandchild.leaves == child.leaves else length
        if gain > cost:
            child.children.remove(grandchild)
            child.leaves -= grandchild.leaves
            node.children.append(grandchild)


def _common_prefix(first: Int32Array, second: Int32Array) -> int:
    """Return how many tokens two sequences have in common from the first on."""
    span = min(len(first), len(second))
    differs = first[:span] != second[:span]
    at = int(np.argmax(differs)) if span else 0
    return at if span and differs[at] else span


def decode_to_prompt_ratio(
    group: PrefixGroup, prompt_tokens: Callable[[int], int], output_tokens: Callable[[int], float]
) -> float:
    """Return a group's expected output tokens per prompt token; its prefix counts once.

    Args:
        group: the group.
        prompt_tokens, output_tokens: return the numbers of a member's tokens.
    """
    prompts = sum(map(prompt_tokens, group.members)) - group.saving
    return sum(map(output_tokens, group.members)) / max(prompts, 1)


def order_groups(
    groups: Sequence[PrefixGroup],
    prompt_tokens: Callable[[int], int],
    output_tokens: Callable[[int], float],
) -> list[PrefixGroup]:
    """Return groups with the highest decode-to-prompt ratio first; arguments as there.

    Equal ones are in the order of their first members in the input.
    """
    return sorted(
        groups,
        key=lambda group: (
            -decode_to_prompt_ratio(group, prompt_tokens, output_tokens),
            min(group.members),
        ),
    )
