"""KVMerger against loops over single tokens, and in the engine."""

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from fake_keys import (
    CONFIG,
    DIM,
    GROUP,
    KV_HEADS,
    LAYERS,
    ArrayCells,
    fake_keys,
    fake_queries,
    kept_of,
    naive_attention,
)
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.evict.kvmerger import (
    MASSES,
    KVMerger,
    Neighbours,
    meet_budget,
    protected_tokens,
    run_starts,
)
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import build_engine, request, same, serve

HEADS, TOKENS = LAYERS * KV_HEADS, 60
EVERY_LAYER = {"first_layers": 0, "last_layers": 0}


def select(
    method: KVMerger, keys: SequenceKeys, queries: np.ndarray | None = None
) -> Selection | None:
    """What a method keeps of a prompt whose rows have all been observed."""
    rows = fake_queries(int(keys.counts[0])) if queries is None else queries
    selection = method.start(CONFIG).select(keys, rows)
    if selection is not None:
        selection.check(keys.counts)
    return selection


def merged_keys(selection: Selection) -> AddedKeys:
    assert selection.added is not None
    return selection.added


def cells(selection: Selection) -> np.ndarray:
    """How many entries each layer and head holds: [layers, kv_heads]."""
    counts = np.diff(selection.indptr) + np.diff(merged_keys(selection).indptr)
    return counts.reshape(LAYERS, KV_HEADS)


def smooth_keys(tokens: int, seed: int = 0) -> tuple[SequenceKeys, ArrayCells]:
    """Keys that change slowly along a prompt, and now and then at once."""
    keys, store = fake_keys(tokens, seed)
    walk = store.keys.reshape(HEADS, tokens, DIM)
    jumps = np.random.default_rng(seed + 1).random((HEADS, tokens)) < 0.1
    for token in range(1, tokens):
        own = np.where(jumps[:, token, None], 1.0, 0.25)
        walk[:, token] = (1 - own) * walk[:, token - 1] + own * walk[:, token]
    return keys, store


# --- sets ---


def naive_protected(attention: np.ndarray, recent: int, heavy: int) -> set[int]:
    older = range(len(attention) - recent)
    best = sorted(older, key=lambda token: -attention[token])[:heavy]
    return {*best, *range(len(attention) - recent, len(attention))}


def naive_sets(keys: np.ndarray, protected: set[int], epsilon: float) -> list[list[int]]:
    """Walk from the last token to the first, as the paper does."""
    sets, current = [], [len(keys) - 1]
    for token in reversed(range(len(keys) - 1)):
        one, other = keys[token].astype(np.float64), keys[token + 1].astype(np.float64)
        cosine = one @ other / np.sqrt((one @ one) * (other @ other))
        if token in protected or token + 1 in protected or cosine < epsilon:
            sets.append(current)
            current = [token]
        else:
            current = [token, *current]
    return [*sets, current][::-1]


def naive_entry(
    keys: np.ndarray, values: np.ndarray, attention: np.ndarray, members: list[int], sigma: float
) -> tuple[np.ndarray, np.ndarray]:
    """The key and value that a set becomes."""
    pivot = max(members, key=lambda token: attention[token])
    squares = [float(((keys[token] - keys[pivot]) ** 2).sum()) for token in members]
    variance = sigma**2 or sum(squares) / len(squares)
    powers = [np.exp(-square / (2 * variance)) for square in squares]
    shares = np.array(powers) / sum(powers)
    return shares @ keys[members], shares @ values[members]


@pytest.mark.parametrize("sigma", [0.0, 0.7])
@pytest.mark.parametrize(("recent", "heavy"), [(0.3, 0.2), (0.0, 0.0), (0.5, 0.2), (0.0, 0.45)])
def test_sets_and_entries_are_those_of_a_loop_over_tokens(
    recent: float, heavy: float, sigma: float
) -> None:
    keys, store = smooth_keys(TOKENS)
    queries = fake_queries(TOKENS)
    method = KVMerger(
        budget=24, epsilon=0.8, recent=recent, heavy=heavy, sigma=sigma, **EVERY_LAYER
    )
    selection = select(method, keys, queries)
    assert selection is not None
    received = naive_attention(store, queries, TOKENS).sum(axis=2)
    added = merged_keys(selection)
    merged = 0
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        place = layer * KV_HEADS + head
        of_head = slice(place * TOKENS, (place + 1) * TOKENS)
        own, values = (each[of_head].astype(np.float64) for each in (store.keys, store.values))
        attention = received[layer, head * GROUP : (head + 1) * GROUP].sum(axis=0)
        protected = naive_protected(attention, round(recent * 24), round(heavy * 24))
        sets = naive_sets(own, protected, 0.8)
        assert kept_of(selection, layer, head) == [one[0] for one in sets if len(one) == 1]
        several = [one for one in sets if len(one) > 1]
        ours = slice(added.indptr[place], added.indptr[place + 1])
        expected = [naive_entry(own, values, attention, one, sigma) for one in several]
        np.testing.assert_allclose(added.keys[ours], [key for key, _ in expected], atol=1e-5)
        np.testing.assert_allclose(added.values[ours], [value for _, value in expected], atol=1e-5)
        assert added.terms is not None
        sizes = np.exp(added.terms.score_bias[ours])
        np.testing.assert_allclose(sizes, [len(one) for one in several], rtol=1e-5)
        merged += len(several)
    assert merged > 40


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_in_one_set_of_neighbours_and_protected_ones_are_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for tokens in (1, 2, 3, 17, 64):
        similarity = rng.uniform(-1, 1, tokens - 1).astype(np.float32)
        protected = rng.random(tokens) < 0.3
        protected[[0, -1]] = seed % 2 == 0  # at both ends, or at none
        starts = run_starts(Neighbours(similarity, protected), 0.2)
        sizes = np.diff(starts, append=tokens)
        assert starts[0] == 0
        assert (sizes > 0).all()
        assert sizes.sum() == tokens
        assert (np.repeat(sizes, sizes)[protected] == 1).all()


@pytest.mark.parametrize("entries", [1, 2, 3, 5, 20])
def test_as_many_sets_as_the_least_similarity_allows_lie_between_protected_tokens(
    entries: int,
) -> None:
    keys, _ = fake_keys(TOKENS)
    selection = select(KVMerger(budget=entries, epsilon=-1, **EVERY_LAYER), keys)
    assert selection is not None
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        kept = kept_of(selection, layer, head)
        gaps = np.diff([-1, *kept, TOKENS]) > 1
        place = layer * KV_HEADS + head
        assert np.diff(merged_keys(selection).indptr)[place] == gaps.sum()
    assert cells(selection).max() <= entries


def test_protected_are_the_last_tokens_and_those_with_most_attention_before_them() -> None:
    attention = np.array([5.0, 1, 4, 4, 0, 9, 9], np.float32)
    assert np.flatnonzero(protected_tokens(attention, 2, 2)).tolist() == [0, 2, 5, 6]
    assert not protected_tokens(attention, 0, 0).any()
    assert protected_tokens(attention, 7, 3).all()


# --- the budget ---


def searched_epsilon(heads: list[Neighbours], entries: int) -> float:
    """The paper's search: twenty halvings."""
    low, high = -1.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if sum(len(run_starts(head, middle)) for head in heads) <= entries:
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize("entries", [30, 60, 100, 149])
def test_epsilon_is_the_limit_of_a_binary_search(entries: int) -> None:
    rng = np.random.default_rng(entries)
    heads = [
        Neighbours(rng.uniform(-1, 1, 49).astype(np.float32), rng.random(50) < 0.1)
        for _ in range(3)
    ]
    epsilon = meet_budget(heads, entries)
    assert epsilon == pytest.approx(searched_epsilon(heads, entries), abs=1e-5)
    least = sum(len(run_starts(head, -1.0)) for head in heads)
    assert sum(len(run_starts(head, epsilon)) for head in heads) == max(entries, least)


@pytest.mark.parametrize("budget", [0.5, 0.35, 0.1, 24])
@pytest.mark.parametrize("make", [fake_keys, smooth_keys])
def test_a_budget_is_met_to_the_entry_over_all_layers(budget: float, make: object) -> None:
    assert callable(make)
    keys, _ = make(200)
    selection = select(KVMerger(budget=budget), keys)
    assert selection is not None
    expected = budget * 200 if budget < 1 else budget
    assert cells(selection).sum() == expected * HEADS


def test_first_and_last_layers_stay_whole_where_the_others_keep_half_of_the_budget() -> None:
    method = KVMerger()
    assert method.merged_layers(30, 1200, 600) == range(2, 29)
    assert method.merged_layers(30, 1200, 300) == range(2, 29)
    assert method.merged_layers(30, 1200, 150) == range(30)
    assert method.merged_layers(4, 1200, 600) == range(4)
    assert KVMerger(first_layers=3, last_layers=1).merged_layers(4, 1200, 600) == range(4)
    keys, _ = fake_keys(200)
    selection = select(KVMerger(budget=0.75, first_layers=1, last_layers=0), keys)
    assert selection is not None
    assert cells(selection)[0].tolist() == [200] * KV_HEADS
    assert cells(selection)[1:].max() < 200
    assert cells(selection).sum() == 150 * HEADS


@pytest.mark.parametrize("budget", [0.5, 0.35])
def test_layers_whose_keys_are_more_alike_keep_less_under_one_epsilon(budget: float) -> None:
    keys, store = fake_keys(200)
    store.keys.reshape(LAYERS, -1, DIM)[1] += 2.0
    selection = select(KVMerger(budget=budget, **EVERY_LAYER), keys)
    assert selection is not None
    lengths = cells(selection).sum(axis=1)
    assert lengths.argmin() == 1
    assert lengths[1] < 0.8 * np.delete(lengths, 1).min()


# --- exactness ---


def test_above_1_nothing_merges() -> None:
    keys, store = fake_keys(TOKENS)
    store.keys[:] = 1.5
    assert select(KVMerger(budget=10, epsilon=1.1), keys) is None


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, bias: np.ndarray) -> np.ndarray:
    scores = keys @ query / DIM**0.5 + bias
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


@pytest.mark.parametrize("mass", MASSES)
def test_equal_tokens_lose_nothing_if_an_entry_counts_as_many_times(mass: str) -> None:
    keys, store = fake_keys(TOKENS)
    shape = (HEADS, TOKENS, DIM)
    for array in (store.keys, store.values):
        array.reshape(shape)[:, 10:50] = array.reshape(shape)[:, 10:11]
    selection = select(KVMerger(budget=30, epsilon=0.9999, mass=mass, **EVERY_LAYER), keys)
    assert selection is not None
    added, query = merged_keys(selection), fake_queries(1)[0, 0, 0]
    close = []
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        place = layer * KV_HEADS + head
        ours = slice(added.indptr[place], added.indptr[place + 1])
        own = store.read(keys.cells(place)[kept_of(selection, layer, head)])
        merged = np.arange(added.indptr[place], added.indptr[place + 1])
        factor, bias = np.ones((len(merged), 1)), np.zeros(len(own[0]) + len(merged))
        if added.terms is not None:
            factor = added.terms.value_factor[ours][:, None]
            bias[: len(merged)] = added.terms.score_bias[ours]
        values = np.concatenate((factor * added.values[ours], own[1]))
        found = attend(query, np.concatenate((added.keys[ours], own[0])), values, bias)
        exact = attend(query, *store.read(keys.cells(place)), np.zeros(TOKENS))
        close.append(np.allclose(found, exact, atol=1e-5))
    assert len(set(close)) == 1
    assert close[0] is (mass == "logbias")


@pytest.mark.parametrize("sigma", [0.0, 5.0])
def test_keys_that_are_all_equal_become_one_entry_in_each_gap(sigma: float) -> None:
    keys, store = fake_keys(TOKENS)
    store.keys[:] = 0.5
    selection = select(KVMerger(budget=20, sigma=sigma, **EVERY_LAYER), keys)
    assert selection is not None
    np.testing.assert_allclose(merged_keys(selection).keys, 0.5, rtol=1e-6)
    assert cells(selection).max() <= 20


@pytest.mark.parametrize("tokens", [1, 2, 5, 10, 11])
@pytest.mark.parametrize("budget", [1, 2, 10, 400])
def test_prompts_of_any_length_and_budgets_of_any_size(tokens: int, budget: int) -> None:
    keys, _ = fake_keys(tokens)
    selection = select(KVMerger(budget=budget), keys)
    assert (selection is None) == (tokens <= budget)
    if selection is not None:
        assert cells(selection).sum() == budget * HEADS


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"budget": 0}, "budget"),
        ({"epsilon": -2}, "epsilon must be a cosine similarity"),
        ({"epsilon": np.nan}, "epsilon"),
        ({"recent": 0.5, "heavy": 0.3}, "recent and twice heavy"),
        ({"heavy": -0.1}, "recent and twice heavy"),
        ({"first_layers": -1}, "first_layers"),
        ({"last_layers": -1}, "last_layers"),
        ({"window": -1}, "window"),
        ({"sigma": -1}, "sigma"),
        ({"mass": "all"}, "mass must be one of logbias, value, none"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        KVMerger(**fields)  # type: ignore[arg-type]


def test_a_model_none_of_whose_layers_sees_the_whole_text_is_refused() -> None:
    windowed = dataclasses.replace(CONFIG, sliding_window=24)
    with pytest.raises(InvalidRequestError, match=r"kvmerger needs .* see 24 tokens"):
        KVMerger().for_model(ServedModel(config=windowed, digest="d"))
    some = dataclasses.replace(windowed, windowed_layers=(True, False, True, False))
    assert KVMerger().for_model(ServedModel(config=some, digest="d")) == KVMerger()


# --- in the engine ---

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("t") / "llama"))
    runner = CpuRunner.load(checkpoint, slots=600, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(1, VOCAB), k=length)


def test_without_a_similarity_that_merges_answers_have_the_bits_of_the_whole_kv(
    runner: CpuRunner,
) -> None:
    asked = [request("r", prompt(100), PARAMS)]
    dense = serve(build_engine(runner), asked)["r", 0]
    found = serve(build_engine(runner, method=KVMerger(budget=20, epsilon=1.1)), asked)["r", 0]
    assert same(found, dense)


def test_the_engine_counts_entries_as_the_mass_says(runner: CpuRunner) -> None:
    asked = [request("r", prompt(100), PARAMS)]
    engines = [build_engine(runner, method=KVMerger(mass=mass)) for mass in MASSES]
    second = {serve(one, asked)["r", 0].logprobs[1].logprob for one in engines}
    assert len(second) == len(MASSES)


def test_a_window_observes_the_last_rows_alone(runner: CpuRunner) -> None:
    keys, store = fake_keys(TOKENS)
    queries = fake_queries(8)
    method = KVMerger(budget=24, epsilon=-1, recent=0, heavy=0.1, window=8, **EVERY_LAYER)
    selection = select(method, keys, queries)
    assert selection is not None
    received = naive_attention(store, queries, TOKENS).sum(axis=2)
    for layer, head in np.ndindex(LAYERS, KV_HEADS):
        attention = received[layer, head * GROUP : (head + 1) * GROUP].sum(axis=0)
        assert naive_protected(attention, 0, 2) <= set(kept_of(selection, layer, head))
    text, caches = prompt(200), []
    one = build_engine(runner, method=KVMerger(window=16), token_budget=50)
    for tokens in (180, 200):
        asked = [request("r", text[:tokens], PARAMS)]
        other = build_engine(runner, method=KVMerger(window=16))
        found, alone = serve(one, asked)["r", 0], serve(other, asked)["r", 0]
        assert same(found, alone)
        caches.append(found.cached_tokens)
    assert caches == [0, 180]


@pytest.mark.parametrize("budget", [0.5, 0.35])
def test_slots_are_held_for_the_entries_and_no_more(runner: CpuRunner, budget: float) -> None:
    held: list[int] = []
    lengths: list[np.ndarray] = []

    def record(engine: Engine) -> None:
        stats = engine.stats()
        for sequence in engine._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                held.append(stats.slots_total - stats.slots_free - stats.slots_cached)
                lengths.append(np.diff(sequence.kv.prefix.index.indptr))

    engine = build_engine(runner, method=KVMerger(budget=budget, **EVERY_LAYER))
    serve(engine, [request("r", prompt(200), PARAMS)], after_step=record)
    heads = runner.config.layers * runner.config.kv_heads
    assert held[0] == budget * 200
    assert lengths[0].sum() == budget * 200 * heads
    assert len({tuple(one) for one in lengths}) == 1
    assert np.ptp(lengths[0]) > 0, "heads merge as much as their keys are alike"


def test_the_next_keystroke_finds_its_beginning_and_gets_the_same_bits(runner: CpuRunner) -> None:
    text = prompt(300)
    method = KVMerger(budget=48, window=0, **EVERY_LAYER)
    one = build_engine(runner, method=method, token_budget=50)
    for tokens, tenant, cached in ((180, "a", 0), (200, "a", 128), (150, "a", 128), (150, "b", 0)):
        asked = [request("r", text[:tokens], PARAMS, tenant)]
        other = build_engine(runner, method=KVMerger(budget=48, window=0, **EVERY_LAYER))
        found, alone = serve(one, asked)["r", 0], serve(other, asked)["r", 0]
        assert found.cached_tokens == cached
        assert same(found, alone)
