"""What eviction methods keep, against loops over single scores."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fake_keys import (
    CONFIG,
    GROUP,
    KV_HEADS,
    LAYERS,
    fake_keys,
    fake_queries,
    kept_of,
    naive_attention,
)
from made_methods import make_method, small_method

from midfill.errors import InvalidRequestError
from midfill.methods.evict.cake import Cake, divide_budget
from midfill.methods.evict.snapkv import SnapKV
from midfill.methods.evict.streaming_llm import StreamingLLM
from midfill.methods.evict.window_attention import average_pool, group_mean, window_attention
from midfill.methods.registry import METHODS, methods_of, resolve_method

TOKENS, WINDOW = 60, 6
BUDGETED = [name for name in methods_of("evict") if "budget" in METHODS[name].options()]


def pooled(scores: np.ndarray, kernel: int) -> np.ndarray:
    side = kernel // 2
    padded = np.concatenate((np.zeros(side), scores, np.zeros(side)))
    return np.array([padded[i : i + kernel].sum() / kernel for i in range(len(scores))])


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda key: -scores[key])[:count])


def naive_scores(weights: np.ndarray, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Scores [kv_heads, keys] of one layer's weights [query_heads, rows, keys]."""
    result = []
    for kv_head in range(KV_HEADS):
        votes = [pooled(score(weights[kv_head * GROUP + member]), 5) for member in range(GROUP)]
        result.append(sum(votes) / GROUP)
    return np.array(result)


def test_snapkv_keeps_what_the_window_attends_to_and_the_window() -> None:
    keys, store = fake_keys(TOKENS)
    queries = fake_queries(WINDOW)
    selection = SnapKV(budget=20, window=WINDOW).select(keys, queries)
    assert selection is not None
    weights = naive_attention(store, queries, TOKENS)[..., :-WINDOW]
    for layer in range(LAYERS):
        scores = naive_scores(weights[layer], lambda rows: rows.sum(axis=0))
        for head in range(KV_HEADS):
            expected = best(scores[head], 20 - WINDOW) + list(range(TOKENS - WINDOW, TOKENS))
            assert kept_of(selection, layer, head) == expected


def test_cake_follows_its_equations() -> None:
    method = Cake(budget=20, window=WINDOW, tau1=1.6, tau2=0.4)
    keys, store = fake_keys(TOKENS)
    queries = fake_queries(WINDOW)
    selection = method.select(keys, queries)
    assert selection is not None
    weights = naive_attention(store, queries, TOKENS)[..., :-WINDOW]
    preferences = []
    for layer in weights:
        dispersion = sum(-value * np.log(value + 1e-10) for value in layer.reshape(-1))
        shift = sum(
            np.var(layer[head, :, key], ddof=1)
            for head in range(len(layer))
            for key in range(layer.shape[-1])
        )
        preferences.append(dispersion ** (1 / 1.6) * shift ** (1 / 0.4))
    budgets = divide_budget(np.array(preferences), (20 - WINDOW) * LAYERS, TOKENS - WINDOW)
    assert len(set(budgets.tolist())) > 1
    for layer in range(LAYERS):
        scores = naive_scores(
            weights[layer], lambda rows: rows.mean(axis=0) + 200 * rows.var(axis=0, ddof=1)
        )
        for head in range(KV_HEADS):
            expected = best(scores[head], budgets[layer]) + list(range(TOKENS - WINDOW, TOKENS))
            assert kept_of(selection, layer, head) == expected


@pytest.mark.parametrize("seed", range(6))
def test_cakes_cascade_ends_with_what_one_decision_keeps(seed: int) -> None:
    method = Cake(budget=20, window=WINDOW, tau1=1.6, tau2=0.4, cascade=1)
    keys, _ = fake_keys(TOKENS, seed)
    queries = fake_queries(WINDOW, seed + 1)
    selection = method.select(keys, queries)
    assert selection is not None
    trimmer = method.start_cascade(CONFIG, TOKENS)
    ranked: list[np.ndarray] = []
    one_layer = replace(CONFIG, layers=1)
    for layer in range(LAYERS):
        heads = np.arange(layer * KV_HEADS, (layer + 1) * KV_HEADS)
        ranked.append(trimmer.rank(keys.of_heads(one_layer, heads), queries[layer : layer + 1]))
        sizes = trimmer.sizes()
        assert sizes.sum() <= 20 * LAYERS
        ranked = [kept[:, :size] for kept, size in zip(ranked, sizes, strict=True)]
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        expected = set(kept_of(selection, layer, head))
        found = set(ranked[layer][head].tolist())
        # A layer whose share would have grown again keeps what it still has.
        assert found <= expected
        assert len(expected) - len(found) <= 2


def test_cake_without_variance_scores_like_snapkv() -> None:
    keys, _ = fake_keys(TOKENS)
    weights = window_attention(keys, fake_queries(WINDOW), 0)
    mean = Cake(gamma=0.0).scores(weights, KV_HEADS)
    votes = group_mean(average_pool(weights.sum(axis=1), 5), KV_HEADS)
    np.testing.assert_allclose(mean * WINDOW, votes, rtol=1e-5)


def test_cake_gives_wide_and_changeable_layers_more() -> None:
    method = Cake(budget=20, window=4)
    spread = np.full((2, 4, 50), 1 / 50, np.float32)
    peaked = np.zeros((2, 4, 50), np.float32)
    peaked[:, :, 7] = 1.0
    changing = peaked.copy()
    changing[:, ::2] = 0.0
    changing[:, ::2, 9] = 1.0
    noise = np.random.default_rng(0).uniform(0, 1e-3, spread.shape).astype(np.float32)
    assert method.preference(spread + noise) > method.preference(peaked + noise)
    assert method.preference(changing + noise) > method.preference(peaked + noise)


class EqualBudgets(Cake):
    """Scores as CAKE does, and gives all layers the same."""

    def preference(self, weights: np.ndarray) -> float:
        return 1.0


def test_cake_and_equal_budgets_keep_the_first_of_one_ranking() -> None:
    """What they differ in is how many tokens layers keep, and nothing else."""
    keys, _ = fake_keys(TOKENS)
    queries = fake_queries(WINDOW)
    own, equal = (
        method.select(keys, queries) for method in (Cake(20, WINDOW), EqualBudgets(20, WINDOW))
    )
    assert own is not None
    assert equal is not None
    assert len(own.kept) == len(equal.kept) == 20 * LAYERS * KV_HEADS
    sizes = set()
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        mine, theirs = (set(kept_of(each, layer, head)) for each in (own, equal))
        assert len(theirs) == 20
        assert mine <= theirs or mine >= theirs
        sizes.add(len(mine))
    assert len(sizes) > 1


@pytest.mark.parametrize(
    ("preferences", "total", "most", "expected"),
    [
        ([1, 1, 2], 40, 100, [10, 10, 20]),
        ([0, 0, 1], 40, 30, [5, 5, 30]),
        ([1, 1, 1], 11, 100, [4, 4, 3]),
        ([0, 0, 0], 9, 100, [3, 3, 3]),
        ([np.nan, 1, 1], 9, 100, [3, 3, 3]),
        ([1, 2, 3], 100, 10, [10, 10, 10]),
    ],
)
def test_cake_divides_the_whole_budget_and_no_more(
    preferences: list[float], total: int, most: int, expected: list[int]
) -> None:
    assert divide_budget(np.array(preferences, float), total, most).tolist() == expected


def test_streamingllm_keeps_the_first_tokens_and_the_last() -> None:
    keys, _ = fake_keys(TOKENS)
    selection = StreamingLLM(budget=10).start(CONFIG).select(keys, fake_queries(0))
    assert selection is not None
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        assert kept_of(selection, layer, head) == [0, 1, 2, 3, *range(TOKENS - 6, TOKENS)]


@pytest.mark.parametrize("interval", [1, 5])
def test_streamingllms_window_rolls_while_the_answer_grows(interval: int) -> None:
    window = StreamingLLM(budget=10, interval=interval).start(CONFIG)
    tokens = list(range(TOKENS))
    for _ in range(5):
        keys, _ = fake_keys(len(tokens))
        selection = window.fork().select(keys, fake_queries(0))
        window.select(keys, fake_queries(0))
        assert selection is not None
        assert selection.close_gaps, "distances are within the cache"
        tokens = [tokens[key] for key in kept_of(selection, 0, 0)]
        newest = tokens[-1] + 1
        assert tokens == [0, 1, 2, 3, *range(newest - 6, newest)]
        tokens += range(newest, newest + interval)


@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_of_the_whole_prompt_keeps_everything(name: str) -> None:
    method = make_method(f"{name}:budget={TOKENS}", CONFIG)
    keys, _ = fake_keys(TOKENS)
    queries = fake_queries(min(method.observed_rows, TOKENS))
    assert method.start(CONFIG).select(keys, queries) is None


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("tokens", [1, 3, 31, 33, 64])
@pytest.mark.parametrize("constant", [0.0, np.nan])
def test_prompts_of_any_length_have_a_valid_selection(
    name: str, tokens: int, constant: float
) -> None:
    method = make_method(f"{name}:budget=0.1", CONFIG)
    keys, store = fake_keys(tokens)
    store.keys[:] = constant  # and so is the attention
    queries = fake_queries(min(method.observed_rows, tokens))
    selection = method.start(CONFIG).select(keys, queries)
    if selection is not None:
        selection.check(keys.counts)


@pytest.mark.parametrize("name", sorted({*BUDGETED} - {"h2o", "kvmerger"}))
def test_a_budget_without_room_for_more_than_what_always_stays_is_refused(name: str) -> None:
    options = METHODS[name].options()
    always = options.get("window", options.get("sinks"))
    with pytest.raises(InvalidRequestError, match=f"budget must .*above the {always} tokens"):
        resolve_method(f"{name}:budget={always}")


@pytest.mark.parametrize("name", BUDGETED)
def test_a_share_is_of_the_prompt(name: str) -> None:
    method = make_method(f"{name}:budget=0.25", CONFIG)
    keys, _ = fake_keys(400)
    selection = method.start(CONFIG).select(keys, fake_queries(min(method.observed_rows, 400)))
    assert selection is not None
    added = 0 if selection.added is None else len(selection.added.keys)
    assert len(selection.kept) + added == 100 * LAYERS * KV_HEADS


@pytest.mark.parametrize("name", [*methods_of("evict"), *methods_of("quantize")])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_keys_that_are_no_numbers_are_selected_from_or_refused(name: str, value: float) -> None:
    keys, store = fake_keys(100)
    store.keys[5::100] = value
    method = small_method(name, CONFIG)
    queries = fake_queries(min(method.observed_rows, 100))
    with np.errstate(invalid="ignore", over="ignore"):
        selection = method.start(CONFIG).select(keys, queries)
    assert selection is not None
    if selection.added is not None and not np.isfinite(selection.added.keys).all():
        with pytest.raises(ValueError, match="no finite number"):
            selection.check(keys.counts)
    else:
        selection.check(keys.counts)
