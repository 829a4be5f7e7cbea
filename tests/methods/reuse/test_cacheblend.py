"""What CacheBlend computes again, against a loop over tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.reuse.cacheblend import CacheBlend, caret_distances
from midfill.methods.reuse.method import LayerKV
from midfill.methods.sequence_method import RequestFacts

HEADS, DIM = 2, 4


def layer_kv(tokens: int, seed: int) -> LayerKV:
    keys, values = np.random.default_rng(seed).normal(size=(2, tokens, HEADS, DIM))
    return LayerKV(keys.astype(np.float32), values.astype(np.float32))


@given(st.integers(0, 40), st.sampled_from([0.0, 0.1, 0.15, 0.5, 1.0]), st.booleans())
def test_the_tokens_that_deviate_most_are_chosen(tokens: int, ratio: float, keys: bool) -> None:
    method = CacheBlend(ratio=ratio, compare="keys" if keys else "values")
    copied, computed = layer_kv(tokens, 1), layer_kv(tokens, 2)
    old, new = (one.keys if keys else one.values for one in (copied, computed))
    deviation = [
        sum(
            (new[token, head, channel] - old[token, head, channel]) ** 2
            for head in range(HEADS)
            for channel in range(DIM)
        )
        for token in range(tokens)
    ]
    ranked = sorted(range(tokens), key=lambda token: -deviation[token])
    count = method.recomputed(tokens)
    assert method.select(copied, computed).tolist() == sorted(ranked[:count])


def test_a_share_is_rounded_up() -> None:
    method = CacheBlend(ratio=0.15)
    assert [method.recomputed(count) for count in (0, 1, 7, 20, 100)] == [0, 1, 2, 3, 15]
    assert CacheBlend(ratio=0.0).recomputed(100) == 0


def test_of_equal_deviations_the_first_are_chosen() -> None:
    same = layer_kv(10, 1)
    assert CacheBlend(ratio=0.3).select(same, same).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ratio=1.5", "ratio must be from 0 to 1, not 1.5"),
        ("ratio=nan", "ratio must be from 0 to 1, not nan"),
        ("check_layer=-1", "check_layer must be 0 or more, not -1"),
        ("compare=queries", "compare must be values or keys, not 'queries'"),
        ("min_run=0", "min_run must be at least 1, not 0"),
        ("order=luck", "order must be deviation or caret, not 'luck'"),
        ("rate=1", "cacheblend has no option 'rate'; did you mean 'ratio'"),
    ],
)
def test_bad_options_are_one_clear_line(options: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_method(f"cacheblend:{options}")


def facts(count: int, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> RequestFacts:
    return RequestFacts(count, count, before_caret=tuple(before), after_caret=tuple(after))


def test_distances_are_counted_in_the_text_and_not_in_the_prompt() -> None:
    # PRE 1 2 3 SUF 6 7 8 MID 4 5: the text is 1 2 3 4 5, the caret, 6 7 8.
    found = caret_distances(facts(11, [(1, 4), (9, 11)], [(5, 8)])).tolist()
    assert found[1:4] + found[9:] == [4, 3, 2, 1, 0]
    assert found[5:8] == [0, 1, 2]
    others = [found[place] for place in (0, 4, 8)]
    assert min(others) > max(found[1:4])
    assert others == sorted(others, reverse=True), "the later, the nearer"


@given(st.integers(1, 30), st.lists(st.integers(0, 40), max_size=6))
def test_distances_are_those_of_a_list_of_the_text(count: int, bounds: list[int]) -> None:
    places = sorted(bounds)
    spans = list(zip(places[::2], places[1::2], strict=False))
    before, after = spans[1::2], spans[::2]
    found = caret_distances(facts(count, before, after))
    for side, step in ((before, -1), (after, 1)):
        text = [at for start, end in side for at in range(start, min(end, count))]
        assert found[text[::step]].tolist() == list(range(len(text)))
    shown = {at for start, end in spans for at in range(start, min(end, count))}
    others = [int(found[at]) for at in range(count) if at not in shown]
    assert others == sorted(others, reverse=True)
    assert min(others, default=count + 1) > count
