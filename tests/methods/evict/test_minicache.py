"""MiniCache: what two layers share of a token, against loops over single vectors."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from default_model import DefaultModel
from fake_keys import CONFIG, DIM, KV_HEADS, LAYERS, ArrayCells, fake_keys
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.evict.method import CompressionMethod, SequenceKeys
from midfill.methods.evict.minicache import (
    MergedLayers,
    MiniCache,
    distances,
    lower_layers,
    retained,
    slerp,
)
from midfill.methods.evict.selection import Selection
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from midfill_lab.bench.methods.nulls import make_null
from midfill_lab.bench.methods.spending import cells_per_head
from serving import build_engine, request, same, serve

T = 0.6
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
PROMPT = random.Random(0).choices(range(1, VOCAB), k=100)
NOTHING = np.zeros((0, 0, 0, 0), np.float32)


def method(settings: MiniCache, config: ModelConfig = CONFIG) -> MergedLayers:
    found = settings.for_model(ServedModel(config=config))
    assert isinstance(found, MergedLayers)
    return found


def select(settings: MiniCache, keys: SequenceKeys) -> Selection | None:
    selection = method(settings).start(CONFIG).select(keys, NOTHING)
    if selection is not None:
        selection.check(keys.counts)
    return selection


def angle(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(np.float64), other.astype(np.float64)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    return float(np.arccos(np.clip(cosine, -1, 1)))


def naive_slerp(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    below, above = lower / np.linalg.norm(lower), upper / np.linalg.norm(upper)
    omega = np.arccos(below @ above)
    shared = np.sin((1 - T) * omega) * below + np.sin(T * omega) * above
    return shared / np.linalg.norm(shared)


def vectors(count: int, seed: int) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(count, DIM))).astype(np.float32)


class TestSlerp:
    def test_is_that_of_single_vectors_and_keeps_their_norms(self) -> None:
        lower, upper = vectors(50, 0), vectors(50, 1)
        merged = slerp(lower, upper, T)
        for token in range(50):
            shared, omega = merged.shared[token], angle(lower[token], upper[token])
            np.testing.assert_allclose(shared, naive_slerp(lower[token], upper[token]), atol=1e-5)
            for vector, norm, part in (
                (lower[token], merged.lower[token], T),
                (upper[token], merged.upper[token], 1 - T),
            ):
                restored = norm * shared
                assert np.linalg.norm(restored) == pytest.approx(np.linalg.norm(vector), rel=1e-5)
                assert angle(shared, vector) == pytest.approx(part * omega, abs=1e-4)
            assert distances(lower, upper)[token] == pytest.approx(omega / np.pi, abs=1e-6)

    def test_equal_vectors_are_restored(self) -> None:
        same_way = vectors(5, 0)
        merged = slerp(same_way, 2 * same_way, T)
        np.testing.assert_allclose(merged.lower[:, None] * merged.shared, same_way, rtol=1e-5)
        np.testing.assert_allclose(merged.upper[:, None] * merged.shared, 2 * same_way, rtol=1e-5)
        assert distances(same_way, 2 * same_way).max() < 1e-6

    def test_opposite_vectors_give_the_direction_that_weighs_more(self) -> None:
        one = vectors(5, 0)
        assert distances(one, -one).min() > 1 - 1e-6
        for t, sign in ((0.6, -1), (0.4, 1), (0.5, -1)):
            merged = slerp(one, -one, t)
            np.testing.assert_allclose(merged.lower[:, None] * merged.shared, sign * one, rtol=1e-4)

    def test_a_zero_stays_zero_and_takes_nothing_from_the_other(self) -> None:
        one, zero = vectors(5, 0), np.zeros((5, DIM), np.float32)
        for lower, upper in ((one, zero), (zero, one), (zero, zero)):
            merged = slerp(lower, upper, T)
            np.testing.assert_allclose(merged.lower[:, None] * merged.shared, lower, rtol=1e-5)
            np.testing.assert_allclose(merged.upper[:, None] * merged.shared, upper, rtol=1e-5)


class TestRetention:
    def test_counts_the_tokens_that_stand_highest_in_either_ranking(self) -> None:
        found = np.random.default_rng(0).random((2, 40))
        kept = np.flatnonzero(retained(found, 0.1, "count"))
        assert len(kept) == 4
        ranking = sorted(
            range(40), key=lambda token: min((row > row[token]).sum() for row in found)
        )
        assert sorted(ranking[:4]) == kept.tolist()
        assert not retained(found, 0.0, "count").any()
        assert retained(found, 1.0, "count").all()

    def test_takes_the_top_of_the_range_of_either(self) -> None:
        found = np.random.default_rng(0).random((2, 40))
        kept = retained(found, 0.2, "range")
        for token in range(40):
            far = [row[token] > row.max() - 0.2 * (row.max() - row.min()) for row in found]
            assert kept[token] == any(far)
        assert not retained(found, 0.0, "range").any()

    @pytest.mark.parametrize("by", ["count", "range"])
    def test_one_token_is_retained_or_not(self, by: str) -> None:
        assert retained(np.full((2, 1), 0.3), 0.05, by).sum() == (by == "count")


def test_layers_are_paired_from_the_middle_and_the_last_may_stay_alone() -> None:
    assert list(lower_layers(30, 0.5)) == [15, 17, 19, 21, 23, 25, 27]
    assert list(lower_layers(32, 0.5))[-1] == 30
    assert list(lower_layers(30, 4))[:2] == [4, 6]
    assert not list(lower_layers(30, 30))


def test_two_layers_list_one_cell_with_norms_of_their_own() -> None:
    keys, store = fake_keys(40)
    selection = select(MiniCache(retain=0.1), keys)
    assert selection is not None
    added = selection.added
    assert added is not None
    assert added.terms is not None
    assert added.replaced is not None
    first = LAYERS // 2
    assert len(added.keys) == KV_HEADS * 36
    entries, ends = added.entries(), added.indptr
    for head in range(LAYERS * KV_HEADS):
        kept = selection.kept[selection.indptr[head] : selection.indptr[head + 1]]
        if head < first * KV_HEADS:
            assert kept.tolist() == list(range(40)), "layers below the first pair stay"
            continue
        lower = first * KV_HEADS + head % KV_HEADS
        upper = lower + KV_HEADS
        for entry in range(ends[head], ends[head + 1]):
            token, cell = added.replaced[entry], entries[entry]
            for array, merged, factors in (
                (store.keys, added.keys, added.terms.score_factor),
                (store.values, added.values, added.terms.value_factor),
            ):
                pair = array[lower * 40 + token], array[upper * 40 + token]
                np.testing.assert_allclose(merged[cell], naive_slerp(*pair), atol=1e-5)
                own = pair[head >= lower + KV_HEADS]
                assert factors[entry] == pytest.approx(np.linalg.norm(own), rel=1e-5)
        shown = np.sort(np.concatenate((added.replaced[ends[head] : ends[head + 1]], kept)))
        assert shown.tolist() == list(range(40)), "every token is shown once"
        assert len(kept) == 4


def test_the_most_different_tokens_stay_whole() -> None:
    """The upper layer has the lower one's keys and values, but for a token that is turned by 90
    degrees."""
    keys, store = fake_keys(60)
    lower, upper, planted = 2 * KV_HEADS, 3 * KV_HEADS, 17
    for array in (store.keys, store.values):
        below = array[lower * 60 : upper * 60].reshape(KV_HEADS, 60, DIM)
        above = below.copy()
        pairs = below[:, planted].reshape(KV_HEADS, DIM // 2, 2)
        above[:, planted] = (pairs[:, :, ::-1] * [-1, 1]).reshape(KV_HEADS, DIM)
        array[upper * 60 :] = above.reshape(-1, DIM)
    for by in ("count", "range"):
        selection = select(MiniCache(by=by), keys)
        assert selection is not None
        for head in range(lower, upper + KV_HEADS):
            kept = selection.kept[selection.indptr[head] : selection.indptr[head + 1]]
            assert planted in kept


def test_everything_retained_or_no_pair_leaves_all_as_it_is() -> None:
    for settings in (MiniCache(retain=1.0), MiniCache(first=LAYERS), MiniCache(recent=60)):
        assert select(settings, fake_keys(60)[0]) is None


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_the_shortest_prompts_are_merged(tokens: int) -> None:
    for by in ("count", "range"):
        select(MiniCache(by=by), fake_keys(tokens)[0])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"first": -1}, "first must be"),
        ({"first": 2.5}, "first must be"),
        ({"t": 1.1}, "t must be from 0 to 1"),
        ({"retain": -0.1}, "retain must be from 0 to 1"),
        ({"by": "size"}, "by must be count or range"),
        ({"recent": -1}, "recent must be 0 or more"),
        ({"interval": -1}, "interval must be 0 or more"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        MiniCache(**settings)  # type: ignore[arg-type]


def test_layers_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most the model's 4 layers, not 5"):
        method(MiniCache(first=5))


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=400, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def held_after(engine: Engine, tokens: int, settings: EngineSamplingParams = PARAMS) -> list[int]:
    """Return the slots that an answer holds after every step."""
    held = []

    def look(one: Engine) -> None:
        stats = one.stats()
        held.append(stats.slots_total - stats.slots_free - stats.slots_cached)

    serve(engine, [request("r", PROMPT[:tokens], settings)], after_step=look)
    return held


def test_slots_that_two_layers_share_are_free_for_others(runner: CpuRunner) -> None:
    """Three layers, of which two share cells: of 100 tokens, 5 keep three cells, 95 two."""
    found = method(MiniCache(first=1, interval=0), runner.config)
    held = held_after(build_engine(runner, method=found), 100)
    assert held[1] - 1 == -(-(5 * 3 + 95 * 2) // 3)
    assert held[-2] - held[1] == len(held) - 3, "the answer's tokens take a slot each"
    merged_later = method(MiniCache(first=1, interval=8), runner.config)
    held = held_after(build_engine(runner, method=merged_later), 100)
    assert held[-2] < -(-(140 * 2 + 9 * 6) // 3) + 8, "the answer's tokens are merged in blocks"


def test_every_head_knows_which_tokens_its_cells_are_of(runner: CpuRunner) -> None:
    """At each decision, in both layers of a pair: methods that stand beside this one rely on it."""
    decided = set()

    def look(one: Engine) -> None:
        for sequence in one._queues.running:
            if sequence.kv is not None and (prefix := sequence.kv.prefix) is not None:
                decided.add(prefix.tokens)
                for numbers in np.split(prefix.numbers, prefix.index.indptr[1:-1]):
                    assert np.sort(numbers).tolist() == list(range(prefix.tokens))

    found = method(MiniCache(first=1, recent=10, interval=8), runner.config)
    serve(build_engine(runner, method=found), [request("r", PROMPT, PARAMS)], after_step=look)
    assert len(decided) > 3


class Restoring(MergedLayers):
    """Writes what stands for a token into both layers' own cells, and shares none."""

    def start(self, config: ModelConfig) -> "RestoredTokens":  # type: ignore[override]
        return RestoredTokens(self)


class RestoredTokens:
    def __init__(self, layers: MergedLayers) -> None:
        self._inner = layers.settings, MergedLayers.start(layers, CONFIG)

    def fork(self) -> "RestoredTokens":
        raise AssertionError("one answer per prompt")

    def observe(self, keys: SequenceKeys, queries: np.ndarray) -> None:
        pass

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection | None:
        selection = self._inner[1].select(keys, queries)
        assert selection is not None
        added = selection.added
        assert added is not None
        assert added.terms is not None
        assert added.replaced is not None
        for head in range(keys.heads):
            part = slice(added.indptr[head], added.indptr[head + 1])
            cells, entries = keys.cells(head)[added.replaced[part]], added.entries()[part]
            keys._store.write(
                cells,
                added.terms.score_factor[part, None] * added.keys[entries],
                added.terms.value_factor[part, None] * added.values[entries],
            )
        return None


def test_factors_in_the_kernel_are_what_restored_keys_give(runner: CpuRunner) -> None:
    settings = MiniCache(first=1, interval=0)
    shared = method(settings, runner.config)
    restored = Restoring(settings, shared.merge)
    answers = [
        serve(build_engine(runner, method=each), [request("r", PROMPT, PARAMS)])["r", 0]
        for each in (shared, restored)
    ]
    assert answers[0].tokens == answers[1].tokens
    for one, other in zip(answers[0].logprobs, answers[1].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_answers_to_one_prompt_share_cells_until_one_merges_its_own_tokens(
    runner: CpuRunner,
) -> None:
    """Both merge later tokens; the first to do so copies what it shares, once per cell."""
    found = method(MiniCache(first=1, interval=8), runner.config)
    alone = serve(build_engine(runner, method=found), [request("r", PROMPT, PARAMS)])["r", 0]
    pair = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0, n=2)
    engine = build_engine(runner, method=found)
    answers = serve(engine, [request("r", PROMPT, pair)])
    assert same(answers["r", 0], alone)
    assert same(answers["r", 1], alone)
    stats = engine.stats()
    assert stats.slots_free + stats.slots_cached == stats.slots_total, "no slot is left behind"


def test_layers_alike_share_what_they_have_and_no_answer_changes(tmp_path: Path) -> None:
    """The middle layer writes nothing, and the last one has its keys and values."""
    folder = write_variant("llama", tmp_path / "alike")
    weights = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.1.{name}.weight"][:] = 0
    for name in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj"):
        weights[f"model.layers.2.{name}.weight"] = weights[f"model.layers.1.{name}.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    runner = CpuRunner.load(
        open_checkpoint(folder), slots=400, threads=1, weights="f32", kv_cache_dtype="f32"
    )
    with closing(runner):
        merged = method(MiniCache(first=1, retain=0.0, interval=0), runner.config)
        answers = [
            serve(build_engine(runner, method=each), [request("r", PROMPT, PARAMS)])["r", 0]
            for each in (merged, None)
        ]
    assert answers[0].tokens == answers[1].tokens
    for one, other in zip(answers[0].logprobs, answers[1].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_cells_are_as_many_as_the_formula_says() -> None:
    """30 layers of 3 heads, pairs from layer 15 on: 7 pairs, of which a twentieth stays whole."""
    tokens, config = 2048, replace(CONFIG, layers=30)
    rng, heads = np.random.default_rng(0), 30 * KV_HEADS
    arrays = rng.normal(size=(2, heads * tokens, DIM)).astype(np.float32)
    cells = np.arange(heads * tokens, dtype=np.int32).reshape(heads, tokens)
    keys = SequenceKeys(config, list(cells), ArrayCells(arrays[0], arrays[1]))
    selection = method(MiniCache(), config).start(config).select(keys, NOTHING)
    assert selection is not None
    share = cells_per_head(selection).sum() / (heads * tokens)
    assert share == pytest.approx((30 - 7 * 0.95) / 30, rel=0.01)
    assert share <= 0.82
    # A listed key has the number of its cell and three terms, 16 bytes; a cell of 64 dimensions
    # has 256 bytes in float16 and 72 in 4 bits.
    assert (256 * share + 16) / 256 == pytest.approx(0.841, abs=0.001)
    assert (72 * share + 16) / 256 <= 0.30


TEXTS, TOKENS, ANSWER = 6, 1200, 33


@pytest.fixture(scope="module")
def texts(default_model: DefaultModel) -> list[list[int]]:
    """Source files of 1,200 tokens and 64 that follow."""
    return [default_model.haystacks.hide(100 + each, TOKENS + 64, []) for each in range(TEXTS)]


def divergences(
    model: DefaultModel, texts: list[list[int]], methods: dict[str, CompressionMethod]
) -> dict[str, np.ndarray]:
    """Return the mean divergence from full KV of each text's known tokens: [texts]."""
    found: dict[str, list[float]] = {name: [] for name in methods}
    with model.forced_answers(4 * TOKENS, {"": None, **methods}) as answers:
        for text in texts:
            for name in methods:
                divergence = answers.divergence(name, text[:TOKENS], text[TOKENS:][:ANSWER])
                found[name].append(divergence)
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.slow
@pytest.mark.quality
@pytest.mark.real_model
@pytest.mark.timeout(900)
class TestDefaultModel:
    def test_neighbouring_layers_point_in_unrelated_directions(
        self, default_model: DefaultModel, texts: list[list[int]]
    ) -> None:
        """What MiniCache builds on, cosines near 1, isn't there in this model; -s shows them."""
        found = default_model.keys_and_values(texts[0][:TOKENS])
        keys, values = (part.reshape(len(part), -1, part.shape[-1]) for part in found)
        print("\nlayers   keys: mean cosine, and of 9 in 10   values")
        for layer in range(len(keys) - 1):
            shown = f"{layer:2} {layer + 1:2} "
            for part, bound in ((keys, 0.3), (values, 0.05)):
                cosines = np.cos(np.pi * distances(part[layer], part[layer + 1]))
                low, high = np.quantile(cosines, [0.05, 0.95])
                shown += f"   {cosines.mean():5.2f}  {low:5.2f} to {high:5.2f}"
                assert abs(cosines.mean()) < bound
            print(shown)

    def test_the_less_is_merged_the_less_is_lost_and_snapkv_loses_less_with_as_many_cells(
        self, default_model: DefaultModel, texts: list[list[int]]
    ) -> None:
        served = default_model.served
        methods: dict[str, CompressionMethod] = {
            "SLERP, norms and retention": MiniCache().for_model(served),
            "SLERP and norms": MiniCache(retain=0).for_model(served),
            "from layer 4": MiniCache(first=4).for_model(served),
            "from layer 23": MiniCache(first=23).for_model(served),
            "layers 28 and 29": MiniCache(first=28).for_model(served),
            "SnapKV, as many cells": make_null("minicache", "plain score", served),
        }
        found = divergences(default_model, texts, methods)
        print()
        for name, values in found.items():
            radius = 2.571 * values.std(ddof=1) / np.sqrt(TEXTS)  # Student's, 5 degrees
            print(f"{name:42} {values.mean():.3f} ±{radius:.3f}")
        whole = found["SLERP, norms and retention"].mean()
        assert whole < found["SLERP and norms"].mean()
        assert whole < found["from layer 4"].mean(), "shallow merging is worse"
        assert found["layers 28 and 29"].mean() < found["from layer 23"].mean() < whole
        assert found["SnapKV, as many cells"].mean() < 0.1 * whole, "its directions don't suit this"
