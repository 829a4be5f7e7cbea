"""UNComp: what entropy is, who gets how much, and what heads keep against a loop over rows."""

from pathlib import Path

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
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError
from midfill.lab.calibration.calibrate import calibrate
from midfill.lab.calibration.uncomp import layer_entropy, matrix_entropy, upper_half
from midfill.methods.calibration_store import read
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.uncomp import GroupedHeads, UNComp, high_heads
from midfill.models.checkpoints.opening import open_checkpoint

HEADS = LAYERS * KV_HEADS
HIGH = np.arange(HEADS) % 3 < 2
PROMPT, ANSWER, WINDOW = 60, 30, 6


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def test_one_direction_has_no_entropy_and_all_directions_have_all() -> None:
    line = np.linspace(-1, 1, 50)[:, None] * normal(1, 16)
    assert matrix_entropy(line, 16) == pytest.approx(0, abs=1e-6)
    assert matrix_entropy(np.ones((50, 16)), 16) == pytest.approx(0, abs=1e-6)
    assert matrix_entropy(normal(20_000, 16), 16) == pytest.approx(1, abs=1e-3)


def test_entropy_is_that_of_the_largest_eigenvalues() -> None:
    rows = normal(40, 8) * np.arange(1, 9)
    centred = rows - rows.mean(axis=0)
    unit = np.stack([row / np.sqrt((row**2).sum()) for row in centred])
    values = sorted(np.linalg.svd(unit.T @ unit / 40)[1], reverse=True)
    for kept in (2, 8):
        expected = -sum(value * np.log(value) for value in values[:kept]) / np.log(8)
        assert matrix_entropy(rows, kept) == pytest.approx(expected, abs=1e-6)


def test_entropy_does_not_depend_on_the_basis() -> None:
    rows, (rotation, _) = normal(40, 8) * np.arange(1, 9), np.linalg.qr(normal(8, 8))
    assert matrix_entropy(rows @ rotation, 3) == pytest.approx(float(matrix_entropy(rows, 3)))


def test_a_kv_heads_entropy_is_the_mean_of_its_query_heads() -> None:
    queries = normal(30, KV_HEADS * GROUP, DIM) * np.arange(1, DIM + 1)
    expected = [
        np.mean([matrix_entropy(queries[:, head * GROUP + i], 2) for i in range(GROUP)])
        for head in range(KV_HEADS)
    ]
    np.testing.assert_allclose(layer_entropy(queries, 2, KV_HEADS), expected, rtol=1e-6)


def test_heads_that_were_in_the_upper_half_most_often_are_high() -> None:
    assert upper_half(np.array([[0.1, 0.3, 0.2], [0.3, 0.2, 0.1]])).tolist() == [
        [0, 1, 1],
        [1, 1, 0],
    ]
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


def test_a_measurement_is_the_same_every_time(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path / "llama"))
    settings = "uncomp:texts=3,tokens=300"
    path = calibrate(settings, checkpoint)
    whole = path.read_text()
    assert calibrate(settings, checkpoint, again=True).read_text() == whole
    found = read(path)
    assert found is not None
    config = checkpoint.config
    assert found.tables["marks"].shape == (config.layers, config.kv_heads)
    assert (found.tables["marks"].sum(axis=1) == 3 * ((config.kv_heads + 1) // 2)).all()
    assert (found.tables["entropy"] > 0).all()
