"""UNComp: what entropy is, who gets how much, and what heads keep against a loop over rows."""

from dataclasses import replace

import numpy as np
import pytest
from fake_keys import (
    CONFIG,
    DIM,
    GROUP,
    KV_HEADS,
    LAYERS,
    fake_keys,
    fake_queries,
    kept_of,
    naive_attention,
)

from midfill.errors import InvalidRequestError
from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.uncomp import VERSION, GroupedHeads, UNComp, high_heads
from midfill.methods.served_model import ServedModel

HEADS = LAYERS * KV_HEADS
HIGH = np.arange(HEADS) % 3 < 2
PROMPT, ANSWER, WINDOW = 60, 30, 6


def test_heads_that_were_in_the_upper_half_most_often_are_high() -> None:
    tables = {
        "marks": np.array([[5.0, 1.0, 5.0], [2.0, 2.0, 2.0]]),
        "entropy": np.array([[0.1, 0.9, 0.1], [0.2, 0.4, 0.3]]),
    }
    assert high_heads(tables).tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize("tokens", [20, 100, 101, 256])
def test_the_mean_budget_is_the_budget(tokens: int) -> None:
    found = UNComp(window=WINDOW).budgets(tokens, HIGH)
    assert found.sum() == tokens * HEADS
    assert found[HIGH].min() > found[~HIGH].max()
    np.testing.assert_allclose(found[HIGH].mean() / found[~HIGH].mean(), 2, rtol=0.1)


def test_other_pairs_are_the_codes() -> None:
    reference = UNComp(pair="reference").budgets(512, HIGH)
    assert set(reference[HIGH]) == {768}
    assert set(reference[~HIGH]) == {384}
    extreme = UNComp(pair="extreme", ratio=16).budgets(64, HIGH)
    assert set(extreme[HIGH]) == {64}
    assert set(extreme[~HIGH]) == {9}, "the window, and one key"


def naive_scores(rows: np.ndarray) -> np.ndarray:
    """Scores of one KV head from attention [query heads, rows, keys], the window left out."""
    pooled = []
    for head in rows:
        sums = head.sum(axis=0)[:-WINDOW]
        pooled.append([max(sums[max(0, i - 3) : i + 4]) for i in range(len(sums))])
    return np.mean(pooled, axis=0)


def test_each_head_keeps_what_its_group_may() -> None:
    method = UNComp(budget=24, window=WINDOW, interval=0)
    keys, store = fake_keys(PROMPT)
    queries = fake_queries(WINDOW)
    selection = GroupedHeads(method, tuple(HIGH.tolist())).start(CONFIG).select(keys, queries)
    assert selection is not None
    weights = naive_attention(store, queries, PROMPT)
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        scores = naive_scores(weights[layer, head * GROUP : (head + 1) * GROUP])
        budget = method.budgets(24, HIGH)[layer * KV_HEADS + head]
        best = sorted(np.argsort(-scores, kind="stable")[: budget - WINDOW].tolist())
        assert kept_of(selection, layer, head) == [*best, *range(PROMPT - WINDOW, PROMPT)]
    assert len(selection.kept) == 24 * HEADS


@pytest.mark.parametrize("high", [HIGH, ~HIGH, HIGH[::-1], HIGH | True])
def test_with_equal_budgets_it_keeps_what_the_window_attends_to_whatever_the_grouping(
    high: np.ndarray,
) -> None:
    method = UNComp(budget=24, window=WINDOW, interval=0, ratio=1)
    keys, store = fake_keys(PROMPT)
    queries = fake_queries(WINDOW)
    selection = GroupedHeads(method, tuple(high.tolist())).start(CONFIG).select(keys, queries)
    assert selection is not None
    weights = naive_attention(store, queries, PROMPT)
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        scores = naive_scores(weights[layer, head * GROUP : (head + 1) * GROUP])
        best = sorted(np.argsort(-scores, kind="stable")[: 24 - WINDOW].tolist())
        assert kept_of(selection, layer, head) == [*best, *range(PROMPT - WINDOW, PROMPT)]


def test_heads_hold_equally_many_keys_at_every_token_of_the_answer() -> None:
    """Against rows of attention that are kept as they were, one head after the other."""
    method = UNComp(budget=24, window=WINDOW, interval=1)
    total = PROMPT + ANSWER
    _, store = fake_keys(total)
    queries = fake_queries(total)
    state = GroupedHeads(method, tuple(HIGH.tolist())).start(CONFIG)
    held = [list(range(PROMPT))] * HEADS
    rows: list[list[dict[int, np.ndarray]]] = [[] for _ in range(HEADS)]
    first = PROMPT - WINDOW

    def see(head: int, row: int) -> None:
        """Note the attention of a row to the keys that are held: by key, [query heads]."""
        seen = [key for key in held[head] if key <= row]
        layer, kv_head = divmod(head, KV_HEADS)
        own = queries[layer, row, kv_head * GROUP : (kv_head + 1) * GROUP].astype(np.float64)
        powers = np.exp(own @ store.keys[[head * total + key for key in seen]].T / np.sqrt(DIM))
        powers /= powers.sum(axis=1, keepdims=True)
        rows[head].append(dict(zip(seen, powers.T, strict=True)))

    for head in range(HEADS):
        for row in range(first, PROMPT):
            see(head, row)
    for count in range(PROMPT, total):
        cells = [np.array(keys, np.int32) + i * total for i, keys in enumerate(held)]
        selection = state.select(SequenceKeys(CONFIG, cells, store), queries[:, first:count])
        assert selection is not None
        for head in range(HEADS):
            zero = np.zeros(GROUP)
            matrix = np.array(
                [[each.get(key, zero) for key in held[head]] for each in rows[head][-WINDOW:]]
            ).transpose(2, 0, 1)
            scores = naive_scores(matrix)
            budget = method.budgets(24, HIGH)[head]
            best = sorted(np.argsort(-scores, kind="stable")[: budget - WINDOW].tolist())
            kept = [held[head][i] for i in best] + list(range(count - WINDOW, count))
            place = slice(selection.indptr[head], selection.indptr[head + 1])
            assert [held[head][i] for i in selection.kept[place]] == kept
            assert len(kept) == budget
            held[head] = [*kept, count]
            see(head, count)
        first = count


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"budget": 8}, "above the 8 tokens"),
        ({"ratio": 0.5}, "ratio"),
        ({"pair": "best"}, "mean, reference, extreme"),
        ({"kernel": 2}, "kernel"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        UNComp(**fields)  # type: ignore[arg-type]


def test_of_layers_with_a_window_no_entropy_is_read() -> None:
    mixed = replace(CONFIG, sliding_window=6, windowed_layers=(0, 2))
    marks = np.zeros((LAYERS, KV_HEADS))
    marks[[0, 1, 2, 3], [0, 1, 2, 0]] = 5
    tables = {"marks": marks, "entropy": np.zeros((LAYERS, KV_HEADS))}
    calibration_store.store(Calibration("uncomp", VERSION, "e" * 64, {}, (1, 1), tables))
    found = UNComp().for_model(ServedModel(config=mixed, digest="e" * 64))
    assert isinstance(found, GroupedHeads)
    high = np.array(found.high).reshape(2, KV_HEADS)
    assert high[0, 1]
    assert high[1, 0]
    assert high.sum(axis=1).tolist() == [(KV_HEADS + 1) // 2] * 2
