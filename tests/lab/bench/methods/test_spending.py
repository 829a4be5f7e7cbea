"""A method's cells, spent otherwise: as many as it keeps, on keys that follow from the prompt."""

import numpy as np
import pytest
from fake_keys import CONFIG, GROUP, KV_HEADS, LAYERS, fake_keys, fake_queries, kept_of
from fake_keys import naive_attention as attention

from midfill.methods.evict.cake import Cake
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.snapkv import SnapKV
from midfill_lab.bench.methods.spending import (
    EvenKeys,
    KeyChoice,
    RandomKeys,
    RankedKeys,
    SpentOtherwise,
    cells_per_head,
    divide_equally,
)

TOKENS, WINDOW = 90, 8
CAKE = Cake(budget=30, window=WINDOW, kernel=3)
HEADS = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]


def select(method: CompressionMethod, prompt: int = 0) -> Selection:
    keys, _ = fake_keys(TOKENS)
    tokens = np.full(TOKENS, prompt, np.int32)
    if isinstance(method, SpentOtherwise):
        _, compressor = method.recall(tokens, "")
    else:
        compressor = method.start(CONFIG)
    found = compressor.select(keys, fake_queries(WINDOW))
    assert found is not None
    found.check(keys.counts)
    return found


def spent(choice: KeyChoice, *, equally: bool) -> SpentOtherwise:
    return SpentOtherwise(CAKE, CONFIG, choice, WINDOW, equally)


@pytest.mark.parametrize("choice", [RandomKeys(), EvenKeys()])
def test_the_cells_are_the_methods_and_the_window_stays(choice: KeyChoice) -> None:
    sizes = cells_per_head(select(CAKE))
    assert len(set(sizes.tolist())) > 1, "CAKE's layers differ"
    own, equal = (cells_per_head(select(spent(choice, equally=to_all))) for to_all in (0, 1))
    assert own.tolist() == sizes.tolist()
    assert equal.sum() == sizes.sum()
    assert np.ptp(equal) <= 1
    found = select(spent(choice, equally=True))
    for layer, head in HEADS:
        kept = kept_of(found, layer, head)
        assert kept[-WINDOW:] == list(range(TOKENS - WINDOW, TOKENS))
        assert len(set(kept)) == len(kept)


def test_random_keys_follow_from_the_prompt_alone_and_leave_the_first_tokens() -> None:
    method = spent(RandomKeys(sinks=4), equally=True)
    first, again, other = select(method), select(method), select(method, prompt=1)
    assert first.kept.tolist() == again.kept.tolist() != other.kept.tolist()
    kept = [kept_of(first, layer, head) for layer, head in HEADS]
    assert all(own[:4] == [0, 1, 2, 3] for own in kept)
    assert len({tuple(own) for own in kept}) > 1, "each head draws for itself"
    drawn = [key for own in kept for key in own[4:-WINDOW]]
    assert np.mean(drawn) == pytest.approx((4 + TOKENS - WINDOW - 1) / 2, abs=6)


def test_even_keys_lie_at_equal_distances() -> None:
    kept = kept_of(select(spent(EvenKeys(), equally=True)), 0, 0)[:-WINDOW]
    assert kept[0] == 0
    distances = np.diff(kept)
    assert distances.max() - distances.min() <= 1
    assert kept[-1] + distances.max() >= TOKENS - WINDOW


def test_ranked_keys_are_those_with_the_highest_scores_or_the_lowest() -> None:
    _, store = fake_keys(TOKENS)
    weights = attention(store, fake_queries(WINDOW), TOKENS)[..., : TOKENS - WINDOW]
    votes = weights.sum(axis=2).reshape(LAYERS, KV_HEADS, GROUP, -1).mean(axis=2)

    def scores(*_: object) -> list[np.ndarray]:
        return [votes[layer, head].astype(np.float32) for layer, head in HEADS]

    best = select(spent(RankedKeys(scores), equally=True))
    worst = select(spent(RankedKeys(scores, reverse=True), equally=True))
    for layer, head in HEADS:
        own = votes[layer, head]
        order = sorted(range(len(own)), key=lambda token: own[token])
        kept = kept_of(best, layer, head)[:-WINDOW]
        assert set(kept) == set(order[-len(kept) :])
        assert set(kept_of(worst, layer, head)[:-WINDOW]) == set(order[: len(kept)])


def test_a_prompt_of_which_all_stays_stays_whole() -> None:
    keys, _ = fake_keys(20)
    method = SpentOtherwise(SnapKV(budget=40, window=8), CONFIG, RandomKeys(), 8, equally=True)
    _, compressor = method.recall(np.zeros(20, np.int32), "")
    assert compressor.select(keys, fake_queries(8)) is None


def test_equal_parts_add_up() -> None:
    assert divide_equally(11, 4).tolist() == [3, 3, 3, 2]
    assert divide_equally(8, 4).tolist() == [2, 2, 2, 2]
