"""Which models give way: no more than needed, never a pinned one, those unused longest first."""

from hypothesis import given
from hypothesis import strategies as st

from midfill.serving.server.models.memory import LoadedModel, kv_bytes_each, models_to_unload

MODELS = st.lists(
    st.builds(
        LoadedModel,
        name=st.uuids().map(str),
        bytes=st.integers(0, 100),
        last_used=st.floats(0, 100),
        pinned=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda model: model.last_used,
)


@given(MODELS, st.integers(0, 200), st.integers(0, 400))
def test_the_fewest_of_those_unused_longest_give_way(
    loaded: list[LoadedModel], needed: int, memory: int
) -> None:
    chosen = models_to_unload(loaded, needed, memory)
    order = sorted((model for model in loaded if not model.pinned), key=lambda m: m.last_used)

    def free_after(count: int) -> int:
        return memory - sum(m.bytes for m in loaded) + sum(m.bytes for m in order[:count])

    enough = [count for count in range(len(order) + 1) if free_after(count) >= needed]
    if not enough:
        assert chosen is None
    else:
        assert chosen == tuple(model.name for model in order[: enough[0]])


def test_what_fits_beside_the_others_unloads_nothing() -> None:
    assert models_to_unload([LoadedModel("a", 5, 1.0)], needed=5, memory=10) == ()


def test_kv_gets_equal_parts_of_what_the_weights_leave() -> None:
    assert kv_bytes_each([200, 100], memory=1000) == 350


def test_kv_gets_an_eighth_of_the_memory_where_the_weights_leave_less() -> None:
    assert kv_bytes_each([700, 600], memory=1000) == 125
