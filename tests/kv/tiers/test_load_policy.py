"""Load or compute: the number of chunks that saves most time, from measured rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.kv.tiers.load_policy import MeasuredRate, chunks_to_load

SECONDS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=12)


@pytest.mark.parametrize(
    ("load", "compute", "chunks"),
    [
        ([0.01] * 4, [0.1] * 4, 4),
        ([0.1] * 4, [0.01] * 4, 0),
        ([0.01, 0.01, 0.5], [0.1] * 3, 2),
        ([0.2, 0.01, 0.01], [0.1] * 3, 3),  # the first costs more than it saves, the others pay
        ([0.001], [0.0025], 0),  # less than the overhead
        ([], [], 0),
    ],
)
def test_what_saves_time_is_loaded(load: list[float], compute: list[float], chunks: int) -> None:
    assert chunks_to_load(load, compute) == chunks


@given(SECONDS, st.floats(0, 0.1))
def test_no_other_number_saves_more(pairs: list[tuple[float, float]], overhead: float) -> None:
    load, compute = [one for one, _ in pairs], [one for _, one in pairs]
    saved = [sum(compute[:n]) - sum(load[:n]) for n in range(len(pairs) + 1)]
    chosen = chunks_to_load(load, compute, overhead)
    most = max(saved)
    if chosen:
        assert saved[chosen] == pytest.approx(most)
        assert saved[chosen] > overhead - 1e-9
    else:
        assert most <= overhead + 1e-9


def test_a_rate_follows_what_is_measured() -> None:
    rate = MeasuredRate()
    assert rate.seconds(10) is None
    rate.record(100, 1)
    assert rate.seconds(50) == 0.5
    for _ in range(60):
        rate.record(1000, 1)
    assert rate.seconds(1000) == pytest.approx(1, rel=0.01)
    rate.record(0, 1)
    rate.record(5, 0)
    assert rate.seconds(1000) == pytest.approx(1, rel=0.01)
