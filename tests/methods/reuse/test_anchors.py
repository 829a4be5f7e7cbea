"""Anchors: how many there are, which go first, and what they take."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from midfill.methods.reuse.anchors import Anchor, AnchorPool, AnchorStore, PieceKV, Template


def piece(tokens: int) -> PieceKV:
    shape = (2, 1, tokens, 4)
    return PieceKV(np.zeros(shape, np.float32), np.zeros(shape, np.float32))


def anchor(name: int, tokens: int = 3, uses: int = 0) -> Anchor:
    return Anchor(b"%d" % name, piece(tokens), piece(tokens), None, uses)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=60), st.integers(2, 8))
def test_the_least_used_of_the_five_oldest_goes(added: list[tuple[int, int]], limit: int) -> None:
    pool = AnchorPool(limit)
    expected: list[tuple[int, int]] = []  # name, uses
    for name, uses in added:
        pool.add(anchor(name, uses=uses))
        expected = [each for each in expected if each[0] != name] + [(name, uses)]
        if len(expected) > limit:
            oldest = expected[: min(5, limit)]
            expected.remove(next(one for one in oldest if one[1] == min(u for _, u in oldest)))
        assert [int(each.name) for each in pool.anchors] == [name for name, _ in expected]
        assert len(pool.anchors) <= limit


def test_anchors_that_are_too_short_are_no_candidates() -> None:
    pool = AnchorPool(5)
    for name, tokens in enumerate((2, 3, 4)):
        pool.add(anchor(name, tokens))
    assert [each.name for each in pool.as_long_as(3)] == [b"1", b"2"]
    assert pool.as_long_as(5) == []


def test_those_that_make_up_most_of_the_nearness_are_used() -> None:
    pool = AnchorPool(5)
    found = [anchor(name) for name in range(4)]
    pool.use(found, np.array([0.03, 0.6, 0.02, 0.35]))
    assert [each.uses for each in found] == [0, 1, 0, 1]
    pool.use(found, np.array([0.0, 0.0, 1.0, 0.0]))
    assert [each.uses for each in found] == [0, 1, 1, 1]


def store_of_one(limit: int) -> tuple[AnchorStore, Template]:
    store = AnchorStore(limit)
    template = store.add_template(("ann", b"t"), Template([piece(2)], [AnchorPool(20)]))
    return store, template


def test_bytes_are_counted_and_bounded() -> None:
    limit = 20 * piece(3).nbytes
    store, template = store_of_one(limit)
    assert store.nbytes == piece(2).nbytes
    for name in range(40):
        store.add_content(("ann", b"%d" % name), anchor(name).content)
        store.add_anchors(("ann", b"t"), template, {0: anchor(name)})
        store.add_content(("bob", b"%d" % name), piece(1))
        assert store.nbytes <= limit
        everything = [*store._contents.values()]
        everything += [each for one in store._templates.values() for each in one.segments]
        anchors = [a for t in store._templates.values() for p in t.pools for a in p.anchors]
        everything += [each.offset for each in anchors]
        assert store.nbytes == sum(each.nbytes for each in everything)


def test_what_was_used_least_recently_is_forgotten() -> None:
    store, template = store_of_one(5 * piece(3).nbytes)
    store.add_content(("ann", b"1"), piece(3))
    store.add_anchors(("ann", b"t"), template, {0: anchor(1)})
    for name in range(2, 9):
        assert store.template(("ann", b"t")) is template, "it is in use"
        store.add_content(("ann", b"%d" % name), piece(3))
        assert store.content(("ann", b"%d" % name)) is not None
    assert store.content(("ann", b"1")) is not None, "it is an anchor's"
    assert store.content(("ann", b"6")) is None
    for name in range(2):  # the content before the agent goes, then the agent
        store.add_content(("bob", b"%d" % name), piece(3))
        assert (("ann", b"t") in store._templates) == (name == 0)
    assert store.nbytes <= 5 * piece(3).nbytes


def test_anchors_of_an_agent_that_is_forgotten_are_not_kept() -> None:
    store, template = store_of_one(10 * piece(3).nbytes)
    store.add_anchors(("bob", b"t"), template, {0: anchor(1)})
    assert template.pools[0].anchors == []
    assert store.template(("bob", b"t")) is None


def test_the_first_of_two_requests_that_are_equally_fast_counts() -> None:
    store, template = store_of_one(10 * piece(3).nbytes)
    assert store.add_template(("ann", b"t"), Template([piece(2)], [AnchorPool(20)])) is template
    first = store.add_content(("ann", b"1"), piece(3))
    assert store.add_content(("ann", b"1"), piece(3)) is first
