"""Slots are given to experts in place of those that the router has wanted least."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midfill.runners.torch.experts.slots import ExpertScores, LayerSlots


def scores_after(*steps: list[float], considered: int = 4, decay: float = 0.5) -> ExpertScores:
    scores = ExpertScores(len(steps[0]), considered, decay)
    for shares in steps:
        scores.update(np.array(shares, np.float32))
    return scores


def test_the_expert_with_the_lowest_score_goes() -> None:
    slots = LayerSlots([0, 1, 2], scores_after([0.5, 0.1, 0.3, 0.1]))
    assert slots.take(3, pinned=()) == 1
    assert sorted(slots.held) == [0, 2, 3]
    assert (slots.slot_of(3), len(slots)) == (1, 3)


def test_pinned_experts_stay() -> None:
    slots = LayerSlots([0, 1], scores_after([0.5, 0.1, 0.4]))
    assert slots.take(2, pinned=(1,)) == 0
    assert sorted(slots.held) == [1, 2]


def test_there_is_no_slot_where_all_are_pinned() -> None:
    slots = LayerSlots([0, 1], scores_after([0.5, 0.1, 0.4]))
    assert slots.take(2, pinned=(0, 1)) is None
    assert sorted(slots.held) == [0, 1]
    assert LayerSlots([], scores_after([1.0])).take(0, ()) is None


def test_scores_follow_their_definition() -> None:
    rng = np.random.default_rng(0)
    steps = rng.dirichlet(np.ones(9), size=12).astype(np.float32)
    expected = np.zeros(9)
    for shares in steps:
        kept = np.argsort(-shares)[:4]
        seen = np.where(np.isin(np.arange(9), kept), shares, 0.0)
        expected = 0.3 * seen + 0.7 * expected
    scores = scores_after(*steps.tolist(), decay=0.3)
    by_score = [scores.lowest([int(e) for e in rng.permutation(9)]) for _ in range(20)]
    assert set(by_score) == {int(expected.argmin())}


def test_scores_can_be_set() -> None:
    scores = scores_after([0.1, 0.2, 0.3, 0.4])
    scores.assign([0, 2], np.array([0.5, 0.05], np.float32))
    assert [scores.lowest([0, 1]), scores.lowest([1, 2])] == [1, 2]
    scores.assign([3, 1], 0.0)
    assert scores.lowest([2, 3, 1]) == 3
    scores.update(np.array([0.0, 0.0, 0.0, 1.0], np.float32))
    assert scores.lowest([3, 1]) == 1


def test_more_considered_than_there_are_is_all() -> None:
    assert scores_after([0.6, 0.4], considered=12).lowest([0, 1]) == 1


def operations(held: list[int], fast: list[int]) -> list[tuple[str, int]]:
    slots = LayerSlots(held, scores_after([1.0] * 10))
    copied = [expert for expert in fast if expert not in held]
    done = []
    for operation, expert in slots.operations(fast, copied):
        assert expert in slots.held
        done.append((operation, expert))
    return done


def test_experts_are_copied_at_once_where_there_is_room() -> None:
    assert operations([0, 1, 2], [0, 5, 6]) == [
        ("copy", 5), ("copy", 6), ("compute", 0), ("compute", 5), ("compute", 6),
    ]  # fmt: skip


def test_a_slot_holds_one_after_the_other_where_there_are_more() -> None:
    assert operations([0], [0, 5, 6]) == [
        ("compute", 0), ("copy", 5), ("compute", 5), ("copy", 6), ("compute", 6),
    ]  # fmt: skip


@given(st.sets(st.integers(0, 9), min_size=1), st.permutations(range(10)), st.integers(0, 10))
def test_what_is_computed_is_held_until_then(held: set[int], order: list[int], count: int) -> None:
    fast = sorted(order[:count], key=lambda expert: expert not in held)
    done = operations([*held], fast)
    assert [expert for operation, expert in done if operation == "compute"] == fast
    copied = [expert for operation, expert in done if operation == "copy"]
    assert copied == [expert for expert in fast if expert not in held]
