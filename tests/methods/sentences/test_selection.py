"""What is retained, where sentences are and which keys rows read: beside loops that do the same."""

from dataclasses import replace

import numpy as np
import pytest
from fake_keys import CONFIG, DIM, GROUP, KV_HEADS, LAYERS, fake_keys, fake_queries, naive_attention
from hypothesis import given
from hypothesis import strategies as st

from midfill.methods.evict.method import SequenceKeys
from midfill.methods.sentences.selection import (
    SentenceRule,
    chosen_keys,
    end_tokens,
    mean_keys,
    retained_keys,
    sentence_bounds,
    similarities,
)

RULE = SentenceRule(budget=12, retained=30, start=2, recent=3, window=8, kernel=3)


def loop_bounds(ends: list[bool], positions: list[int]) -> list[int]:
    """Where a head's sentences begin, sentence by sentence."""
    starts = [0, *(i + 1 for i, end in enumerate(ends[:-1]) if end)]
    return [sum(p < start for p in positions) for start in starts] + [len(positions)]


def loop_chosen(scores: list[float], bounds: list[int], keys: int, rule: SentenceRule) -> list[int]:
    """The keys that a head's row reads: sort sentences, and take tokens until there are enough."""
    if keys <= rule.budget:
        return list(range(keys))
    first, last = rule.start, keys - rule.recent
    taken: list[int] = []
    for sentence in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        for number in range(bounds[sentence], bounds[sentence + 1]):
            if first <= number < last and len(taken) < rule.budget - rule.start - rule.recent:
                taken.append(number)
    return sorted([*range(first), *taken, *range(last, keys)])


@given(st.data())
def test_bounds_and_choices_are_those_of_a_loop(data: st.DataObject) -> None:
    """Ends at every token, at none and anywhere; sentences of which nothing is retained."""
    tokens = data.draw(st.integers(1, 40))
    chance = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    ends = rng.random(tokens) < chance
    held = data.draw(st.integers(1, tokens))
    positions = np.stack([np.sort(rng.permutation(tokens)[:held]) for _ in range(3)])
    bounds = sentence_bounds(ends, positions.astype(np.int32))
    expected = [loop_bounds(ends.tolist(), own.tolist()) for own in positions]
    assert bounds.tolist() == expected
    assert (bounds[:, -1] == held).all(), "every key is in a sentence"
    rule = data.draw(
        st.builds(
            lambda start, recent, more: SentenceRule(start + recent + more, 40, start, recent),
            st.integers(0, 4), st.integers(1, 5), st.integers(1, 30),
        )
    )  # fmt: skip
    keys = held + data.draw(st.integers(0, 9))
    scores = rng.integers(0, 3, (3, bounds.shape[1] - 1)).astype(np.float32)
    chosen = chosen_keys(scores, bounds, keys, rule)
    for head in range(3):
        wanted = loop_chosen(scores[head].tolist(), expected[head], keys, rule)
        assert np.flatnonzero(chosen[head]).tolist() == wanted
    assert len(set(chosen.sum(axis=1).tolist())) == 1, "heads read equally many"
    assert chosen.sum(axis=1).max() <= rule.budget
    assert chosen[:, : min(rule.start, keys)].all()
    assert chosen[:, -rule.recent :].all()


def test_mean_keys_are_those_computed_by_hand() -> None:
    keys = np.random.default_rng(0).normal(size=(9, DIM)).astype(np.float32)
    means = mean_keys(keys, np.array([0, 0, 4, 4, 5, 9, 9], np.int32))
    hand = [np.zeros(DIM), keys[:4].mean(axis=0), np.zeros(DIM), keys[4], keys[5:].mean(axis=0)]
    np.testing.assert_allclose(means, [*hand, np.zeros(DIM)], rtol=1e-5, atol=1e-7)
    query = np.random.default_rng(1).normal(size=(2, DIM)).astype(np.float32)
    found = similarities(np.stack([means, -means]), query)
    for head, sentence in np.ndindex(2, 6):
        sign = 1 - 2 * head
        assert found[head, sentence] == pytest.approx(
            sign * means[sentence] @ query[head], abs=1e-5
        )


def loop_retained(weights: np.ndarray, rule: SentenceRule, heads: list[int]) -> list[int]:
    """What a KV head retains, by the votes [heads, rows, n] of some query heads."""
    count = weights.shape[-1]
    votes = np.zeros(count - rule.window)
    for head in heads:
        own = weights[head, :, : -rule.window].sum(axis=0)
        reach = rule.kernel // 2
        votes += [own[max(i - reach, 0) : i + reach + 1].max() for i in range(len(own))]
    best = sorted(range(len(votes)), key=lambda i: (-votes[i], i))[: rule.retained - rule.window]
    return [*sorted(best), *range(count - rule.window, count)]


def test_what_is_retained_is_what_a_loop_retains() -> None:
    keys, store = fake_keys(60)
    queries = fake_queries(RULE.window)
    weights = naive_attention(store, queries, 60)
    found = retained_keys(keys, queries, RULE)
    assert found.shape == (LAYERS * KV_HEADS, RULE.retained)
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        group = list(range(head * GROUP, (head + 1) * GROUP))
        assert found[layer * KV_HEADS + head].tolist() == loop_retained(weights[layer], RULE, group)


def test_a_group_of_one_query_head_is_the_reference_s_form_per_query_head() -> None:
    keys, store = fake_keys(60)
    config = replace(CONFIG, query_heads=KV_HEADS)
    alone = SequenceKeys(config, [keys.cells(head) for head in range(keys.heads)], store)
    queries = np.ascontiguousarray(fake_queries(RULE.window)[:, :, ::GROUP])
    weights = naive_attention(store, np.repeat(queries, GROUP, axis=2), 60)
    found = retained_keys(alone, queries, RULE)
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        own = loop_retained(weights[layer], RULE, [head * GROUP])
        assert found[layer * KV_HEADS + head].tolist() == own


@pytest.mark.parametrize("tokens", [1, 5, 8, 30])
def test_short_prompts_are_retained_whole(tokens: int) -> None:
    keys, _ = fake_keys(tokens)
    found = retained_keys(keys, fake_queries(min(tokens, RULE.window)), RULE)
    assert found.tolist() == [list(range(tokens))] * (LAYERS * KV_HEADS)


def test_a_sentence_longer_than_the_budget_is_cut_and_one_that_is_none_is_not_read() -> None:
    scores = np.array([[1.0, 2.0]], np.float32)
    long = chosen_keys(scores, np.array([[0, 20, 40]], np.int32), 40, RULE)
    assert np.flatnonzero(long[0]).tolist() == [0, 1, *range(20, 27), 37, 38, 39]
    written = chosen_keys(scores, np.array([[0, 2, 4]], np.int32), 40, RULE)
    assert np.flatnonzero(written[0]).tolist() == [0, 1, 2, 3, 37, 38, 39]


def test_ends_are_found_by_what_tokens_say_however_they_are_spelled() -> None:
    texts = [".", " .", ". ", "!", "?", "...", "\n\n", "\n\n\n", "。", "", "\n", ",", "a.", ".."]
    spelled = [text.encode() for text in texts]
    found = end_tokens(spelled.__getitem__, len(texts), lines=False)
    assert found.tolist() == [True] * 9 + [False] * 5
    lines = end_tokens(spelled.__getitem__, len(texts), lines=True)
    assert [texts[i] for i in np.flatnonzero(lines)] == ["\n\n", "\n\n\n", "\n"]
    broken = end_tokens([b"\xe3\x80", b"."].__getitem__, 2, lines=False)
    assert broken.tolist() == [False, True]
