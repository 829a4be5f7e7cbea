"""Prefix groups: against the exact optimum and the bound of sharing at every level."""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.arrays import Int32Array
from midfill.serving.server.batch.prefix_groups import (
    PrefixGroup,
    PrefixNode,
    build_prefix_tree,
    decode_to_prompt_ratio,
    find_prefix_groups,
    maximize_reuse,
    order_groups,
)

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=24)
"""Few different tokens: prompts share prefixes, repeat, and begin each other."""


def arrays(prompts: Sequence[Sequence[int]]) -> list[Int32Array]:
    return [np.array(prompt, np.int32) for prompt in prompts]


def saving(groups: Sequence[PrefixGroup]) -> int:
    return sum(group.saving for group in groups)


def best_saving(root: PrefixNode) -> int:
    """The exact optimum of single-level sharing.

    F(v, a) is the most that is saved below v if a is the depth of the nearest prefix above that is
    computed for sharing; computing v's own costs its depth, and each prompt saves that of the
    deepest one above its end.
    """

    @cache
    def below(node: PrefixNode, opened: int) -> int:
        shut = len(node.ends) * opened + sum(below(child, opened) for child in node.children)
        own = node.depth
        ends = len(node.ends) * own
        return max(shut, ends - own + sum(below(child, own) for child in node.children))

    return below(root, 0)


def bound_of_all_levels(root: PrefixNode) -> int:
    """What is saved if every node's tokens are computed once."""
    return sum(
        (child.leaves - 1) * (child.depth - node.depth)
        for node in root.walk()
        for child in node.children
    )


def naive_leaves(prompts: Sequence[Sequence[int]], prefix: Sequence[int]) -> int:
    return sum(list(prompt[: len(prefix)]) == list(prefix) for prompt in prompts)


def random_workload(seed: int) -> list[list[int]]:
    """Prompts of a random tree of templates, as workloads with nested shared prefixes have them."""
    rng = random.Random(seed)
    texts: list[list[int]] = [[]]
    for _ in range(rng.randint(1, 30)):
        run = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
        texts.append([*rng.choice(texts), *run])
    prompts = []
    for _ in range(rng.randint(2, 120)):
        own = [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
        prompts.append([*rng.choice(texts), *own])
    return prompts


@given(PROMPTS)
def test_the_tree_holds_each_prompt_once_and_counts_those_below(prompts: list[list[int]]) -> None:
    root = build_prefix_tree(arrays(prompts))
    assert sorted(root.prompts()) == list(range(len(prompts)))
    for node in root.walk():
        numbers = node.prompts()
        assert node.leaves == len(numbers)
        assert all(len(prompts[number]) == node.depth for number in node.ends)
        for child in node.children:
            assert child.depth > node.depth
        if node is not root:
            prefix = prompts[numbers[0]][: node.depth]
            assert naive_leaves(prompts, prefix) == node.leaves
            assert node.ends or len(node.children) > 1, "the tree is not compact"


@given(PROMPTS)
def test_each_prompt_is_in_one_group_and_begins_with_its_prefix(prompts: list[list[int]]) -> None:
    groups = find_prefix_groups(arrays(prompts))
    members = [number for group in groups for number in group.members]
    assert sorted(members) == list(range(len(prompts)))
    for group in groups:
        first = prompts[group.members[0]][: group.prefix]
        assert all(prompts[number][: group.prefix] == first for number in group.members)
        assert all(len(prompts[number]) > group.prefix for number in group.members)
        assert len(group.members) > 1 or group.prefix == 0
        texts = [prompts[number] for number in group.members]
        assert texts == sorted(texts, key=lambda text: text[:-1])


@given(PROMPTS)
def test_the_saving_is_at_most_the_optimum_and_that_at_most_the_bound(
    prompts: list[list[int]],
) -> None:
    root = build_prefix_tree([prompt[:-1] for prompt in arrays(prompts)])
    found = saving(find_prefix_groups(arrays(prompts)))
    assert 0 <= found <= best_saving(root) <= bound_of_all_levels(root)


@given(PROMPTS)
def test_moving_nodes_up_never_saves_less(prompts: list[list[int]]) -> None:
    root = build_prefix_tree([prompt[:-1] for prompt in arrays(prompts)])
    before = sum((child.leaves - 1) * child.depth for child in root.children)
    maximize_reuse(root)
    assert sum((child.leaves - 1) * child.depth for child in root.children) >= before


def test_the_greedy_groups_are_close_to_the_optimum() -> None:
    shares = []
    for seed in range(200):
        prompts = arrays(random_workload(seed))
        best = best_saving(build_prefix_tree([prompt[:-1] for prompt in prompts]))
        found = saving(find_prefix_groups(prompts))
        assert found <= best
        shares.append(found / best if best else 1.0)
    assert sum(shares) / len(shares) > 0.95
    assert min(shares) > 0.7


def test_nothing_shared_is_groups_of_one() -> None:
    groups = find_prefix_groups(arrays([[1, 2], [2, 3], [3, 4]]))
    assert sorted(groups, key=lambda group: group.members) == [
        PrefixGroup(0, (0,)), PrefixGroup(0, (1,)), PrefixGroup(0, (2,)),
    ]  # fmt: skip


def test_equal_prompts_are_one_group_and_keep_a_token_each() -> None:
    assert find_prefix_groups(arrays([[1, 2, 3]] * 4)) == [PrefixGroup(2, (0, 1, 2, 3))]


def test_a_prompt_may_be_the_beginning_of_another() -> None:
    (group,) = find_prefix_groups(arrays([[1, 2, 3], [1, 2, 3, 4, 5]]))
    assert group == PrefixGroup(2, (0, 1))


def test_no_prompts_are_no_groups() -> None:
    assert find_prefix_groups([]) == []


def test_a_long_chain_of_prompts_is_no_deep_recursion() -> None:
    groups = find_prefix_groups([np.ones(length, np.int32) for length in range(1, 3000)])
    assert sum(len(group.members) for group in groups) == 2999


def test_groups_that_generate_much_for_few_prompt_tokens_come_first() -> None:
    prompts = [[7] * 10 + [number] for number in range(3)] + [[1, 2, 3], [4] * 30]
    groups = find_prefix_groups(arrays(prompts))
    lengths = [len(prompt) for prompt in prompts]
    outputs = [4.0, 4.0, 4.0, 30.0, 1.0]
    ordered = order_groups(groups, lengths.__getitem__, outputs.__getitem__)
    assert [group.members for group in ordered] == [(3,), (0, 1, 2), (4,)]
    # Its prefix of 10 tokens counts once: 10 + 3 tokens for 12 of output.
    shared = ordered[1]
    ratio = decode_to_prompt_ratio(shared, lengths.__getitem__, outputs.__getitem__)
    assert ratio == pytest.approx(12 / 13)
