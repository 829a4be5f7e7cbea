"""EpisodeStore: bounded, the least recently used goes first."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from midfill.methods.episodes.store import EpisodeStore


@dataclass
class Held:
    nbytes: int


@given(
    st.lists(
        st.tuples(st.sampled_from(["keep", "find"]), st.integers(0, 5), st.integers(1, 40)),
        max_size=60,
    )
)
def test_it_holds_the_most_recently_used_that_fit(
    actions: list[tuple[str, int, int]],
) -> None:
    store, held, limit = EpisodeStore(100), {}, 100
    for action, key, size in actions:
        if action == "find":
            found = store.find(key, Held)
            assert found is held.get(key)
            if found is not None:
                held[key] = held.pop(key)
            continue
        held.pop(key, None)
        held[key] = Held(size)
        store.keep(key, held[key])
        while sum(each.nbytes for each in held.values()) > limit:
            del held[next(iter(held))]
        assert store.nbytes == sum(each.nbytes for each in held.values())


def test_what_exceeds_the_limit_by_itself_is_not_held_and_takes_nobodys_place() -> None:
    store = EpisodeStore(100)
    store.keep("b", Held(60))
    store.keep("a", Held(30))
    store.keep("a", Held(200))
    assert store.find("a", Held) is None
    assert store.find("b", Held) == Held(60)
    assert store.nbytes == 60


def test_a_thing_of_another_kind_is_not_found() -> None:
    store = EpisodeStore(100)
    store.keep("a", Held(10))
    assert store.find("a", type(None)) is None  # type: ignore[type-var]
