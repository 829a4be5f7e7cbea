"""MiKV: scores, tiers and codes against plain loops."""

import random
from pathlib import Path

import numpy as np
import pytest
from mixed_keys import (
    CONFIG,
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    MixedKeys,
    bytes_per_head,
    made_queries,
)
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.quantize.mikv import MiKV, MixedPrecision, balance
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import build_engine, request, same, serve

PROMPT, ANSWER = 120, 60


def received(mixed: MixedKeys, queries: np.ndarray, head: int) -> dict[int, float]:
    """What each token has received from rows, the last ones of those held, one at a time."""
    layer, kv_head = divmod(head, KV_HEADS)
    tokens = [*mixed.quantized[head], *mixed.exact[head]]
    exact = mixed.keys[head][mixed.exact[head]]
    keys = np.concatenate((mixed.decoded(head)[0], exact)).astype(np.float64)
    found = dict.fromkeys(tokens, 0.0)
    rows = queries.shape[1]
    for row in range(rows):
        seen = len(tokens) - rows + row + 1
        for query in queries[layer, row, kv_head * GROUP : (kv_head + 1) * GROUP]:
            powers = np.exp(keys[:seen] @ query / np.sqrt(DIM))
            for token, power in zip(tokens, powers / powers.sum(), strict=False):
                found[token] += power
    return found


def after_prompt(
    method: MiKV, tokens: int = PROMPT, seed: int = 0
) -> tuple[MixedKeys, MixedPrecision]:
    """Return what is held after the prompt's decision."""
    mixed = MixedKeys(tokens, seed)
    mixed.grow(0, tokens)
    compressor = method.start(CONFIG)
    selection = compressor.select(mixed.view(), made_queries(tokens))
    if selection is not None:
        mixed.apply(selection)
    return mixed, compressor


@pytest.mark.parametrize("high", [16, 8])
def test_scores_are_those_of_single_rows_and_the_least_attended_are_demoted(high: int) -> None:
    """In the prompt, in blocks or at once, and after each interval of the answer."""
    method = MiKV(ratio=0.3, low=4, high=high, interval=20)
    queries = made_queries(PROMPT + ANSWER)
    mixed = MixedKeys(PROMPT + ANSWER)
    compressor = method.start(CONFIG)
    scores: list[dict[int, float]] = [{} for _ in range(HEADS)]
    important = 0
    for start, end in ((0, 64), (64, 120), (120, 140), (140, 160), (160, 180)):
        mixed.grow(start, end)
        rows = queries[:, start:end]
        for head in range(HEADS):
            for token, more in received(mixed, rows, head).items():
                scores[head][token] = scores[head].get(token, 0.0) + more
        if end == 64:
            compressor.observe(mixed.view(), rows)
            continue
        before = [list(held) for held in mixed.exact]
        selection = compressor.select(mixed.view(), rows)
        assert selection is not None
        mixed.apply(selection)
        count = int(0.3 * end) - (important if high < 16 else 0)
        important += count
        for head, held in enumerate(before):
            newest = held[len(held) - (count + 1) // 2 :]
            older = sorted(held[: len(held) - len(newest)], key=lambda t: -scores[head][t])
            kept = sorted(older[: count - len(newest)] + newest)
            low = sorted(set(held) - set(kept))
            added = [block.tokens for block in selection.quantized[head]]  # type: ignore[index]
            if high == 16:
                assert mixed.exact[head] == kept
                assert mixed.quantized[head][-len(low) :] == low
                assert added == [len(low)]
            else:
                assert mixed.exact[head] == []
                assert mixed.quantized[head][-len(held) :] == [*low, *kept]
                assert added == [len(low), len(kept)]
            order = [*mixed.quantized[head], *mixed.exact[head]]
            expected = [scores[head][token] for token in order]
            np.testing.assert_allclose(compressor.attention.scores[head], expected, rtol=1e-5)
            assert sorted(order) == list(range(end)), "no token is missing"


def test_the_newest_keys_are_never_demoted() -> None:
    for ratio in (0.1, 0.5):
        mixed, _ = after_prompt(MiKV(ratio=ratio))
        newest = int(ratio * PROMPT + 1) // 2
        for held in mixed.exact:
            assert held[-newest:] == list(range(PROMPT - newest, PROMPT))


def test_the_balancer_is_the_roots_of_the_largest_queries_over_the_largest_keys() -> None:
    queries = made_queries(PROMPT)
    mixed = MixedKeys(PROMPT)
    compressor = MiKV().start(CONFIG)
    for start, end in ((0, 64), (64, PROMPT)):
        mixed.grow(start, end)
        if end < PROMPT:
            compressor.observe(mixed.view(), queries[:, start:end])
    compressor.select(mixed.view(), queries[:, 64:])
    assert compressor.channel_scales is not None
    for head in range(HEADS):
        layer, kv_head = divmod(head, KV_HEADS)
        for channel in range(0, DIM, 7):
            heads = range(kv_head * GROUP, (kv_head + 1) * GROUP)
            q = max(abs(queries[layer, t, h, channel]) for t in range(PROMPT) for h in heads)
            k = max(abs(mixed.keys[head, t, channel]) for t in range(PROMPT))
            expected = 1 / np.sqrt(q / k)
            assert compressor.channel_scales[head, channel] == pytest.approx(expected, rel=1e-3)


def test_the_balancer_stays_and_is_in_every_block() -> None:
    mixed, compressor = after_prompt(MiKV(), PROMPT)
    before = compressor.channel_scales
    mixed.keys, mixed.values = (
        np.concatenate((part, 50 * part[:, :40]), axis=1) for part in (mixed.keys, mixed.values)
    )
    mixed.grow(PROMPT, PROMPT + 40)
    selection = compressor.select(mixed.view(), 50 * made_queries(40))
    assert selection is not None
    assert compressor.channel_scales is before


def product_error(mixed: MixedKeys, queries: np.ndarray, head: int) -> float:
    """The root mean square error of query-key products over quantised keys."""
    layer, kv_head = divmod(head, KV_HEADS)
    apart = mixed.decoded(head)[0] - mixed.keys[head][mixed.quantized[head]]
    own = queries[layer, :, kv_head * GROUP : (kv_head + 1) * GROUP].reshape(-1, DIM)
    return float(np.sqrt(np.square(own @ apart.T).mean()))


def with_outliers(method: MiKV) -> tuple[MixedKeys, np.ndarray]:
    """Keys with four large channels, where queries are small."""
    mixed, queries = MixedKeys(PROMPT), made_queries(PROMPT)
    mixed.keys[:, :, ::8] *= 20
    queries[..., ::8] /= 20
    mixed.grow(0, PROMPT)
    selection = method.start(CONFIG).select(mixed.view(), queries)
    assert selection is not None
    mixed.apply(selection)
    return mixed, queries


def test_the_balancer_takes_a_fifth_or_more_off_the_error_of_products() -> None:
    errors = []
    for balanced in (1, 0):
        mixed, queries = with_outliers(MiKV(ratio=0, low=2, balance=balanced))
        errors.append(np.mean([product_error(mixed, queries, head) for head in range(HEADS)]))
    assert errors[0] < 0.8 * errors[1]


def test_balancing_alone_changes_no_product() -> None:
    """Key times b, decoded as times 1 / b, is the key but for rounding."""
    mixed, compressor = after_prompt(MiKV())
    assert compressor.channel_scales is not None
    for head in range(HEADS):
        scale = compressor.channel_scales[head].astype(np.float32)
        restored = mixed.keys[head] / scale * scale
        np.testing.assert_allclose(restored, mixed.keys[head], atol=1e-6)


def share(ratio: float, low: int, high: int, group: int) -> float:
    """The published formula: bytes beside those of all keys in float16."""
    low_bits, high_bits = (bits if bits == 16 else bits + 32 / group for bits in (low, high))
    return (ratio * high_bits + (1 - ratio) * low_bits) / 16


@pytest.mark.parametrize("low", [2, 3, 4])
@pytest.mark.parametrize("high", [16, 8, 4])
def test_bytes_are_those_of_the_formula(low: int, high: int) -> None:
    """But for the balancer, 2 bytes per channel of a block, and the last of a block's cells."""
    tokens, mixed = 1200, MixedKeys(1200)
    mixed.grow(0, tokens)
    compressor = MiKV(ratio=0.2, low=low, high=high).start(CONFIG)
    # Whom keys have attention from doesn't matter here.
    selection = compressor.select(mixed.view(), made_queries(8))
    assert selection is not None
    expected = share(0.2, low, high, DIM // 2) * tokens * DIM * 2 * 2
    balancers = 2 * DIM * (1 if high == 16 else 2)
    assert bytes_per_head(selection) == pytest.approx(expected + balancers)
    assert balancers < 0.01 * expected


def test_the_published_sizes_follow_from_the_formula() -> None:
    found = [share(0.2, 2, high, 64) for high in (16, 8, 4, 2)]
    np.testing.assert_allclose(found, [0.325, 0.231, 0.181, 0.156], atol=6e-4)
    assert share(0.2, 2, 16, 32) == pytest.approx(0.35)


def test_the_more_bits_or_the_more_important_keys_the_smaller_the_error() -> None:
    def error(method: MiKV) -> float:
        mixed, _ = after_prompt(method)
        total = 0.0
        for head in range(HEADS):
            for part, found in zip((mixed.keys, mixed.values), mixed.decoded(head), strict=True):
                total += np.square(found - part[head][mixed.quantized[head]]).sum()
        return total

    by_bits = [error(MiKV(low=low)) for low in (2, 3, 4, 8)]
    by_share = [error(MiKV(ratio=ratio)) for ratio in (0.0, 0.1, 0.2, 0.5, 0.9)]
    for errors in (by_bits, by_share):
        assert errors == sorted(errors, reverse=True)
        assert len(set(errors)) == len(errors)


def test_all_important_changes_nothing() -> None:
    mixed, _ = after_prompt(MiKV(ratio=1.0))
    assert mixed.exact == [list(range(PROMPT))] * HEADS


def test_none_important_quantises_everything_by_plain_rounding() -> None:
    """A share of none, or one that is below one key."""
    for method, tokens in ((MiKV(ratio=0, balance=0), PROMPT), (MiKV(ratio=0.2, balance=0), 4)):
        mixed, _ = after_prompt(method, tokens)
        keys, _ = mixed.decoded(0)
        assert mixed.exact == [[]] * HEADS
        half = mixed.keys[0][:, : DIM // 2].astype(np.float64)
        low, high = half.min(axis=1, keepdims=True), half.max(axis=1, keepdims=True)
        steps = (half - low) / (high - low) * 3
        expected = low + np.round(steps) * (high - low) / 3
        clear = np.abs(steps % 1 - 0.5) > 0.01  # of what rounding of the scale may change
        np.testing.assert_allclose(keys[:, : DIM // 2][clear], expected[clear], atol=4e-3)


@pytest.mark.parametrize("high", [16, 8])
def test_a_prompt_of_one_token_is_quantised_and_its_answer_goes_on(high: int) -> None:
    mixed, compressor = after_prompt(MiKV(ratio=0.5, high=high), 1)
    assert mixed.quantized == [[0]] * HEADS
    longer = MixedKeys(9)
    longer.quantized, longer.blocks = mixed.quantized, mixed.blocks
    longer.grow(1, 9)
    selection = compressor.select(longer.view(), made_queries(8))
    assert selection is not None
    longer.apply(selection)
    for exact, quantized in zip(longer.exact, longer.quantized, strict=True):
        assert len(exact) == (4 if high == 16 else 0)
        assert sorted([*exact, *quantized]) == list(range(9))


def test_constant_vectors_and_channels_of_zeros_are_kept_as_they_are() -> None:
    mixed = MixedKeys(PROMPT)
    mixed.keys[0], mixed.keys[1, :, 3], mixed.values[2] = 0.5, 0.0, -2.0
    mixed.grow(0, PROMPT)
    compressor = MiKV(ratio=0).start(CONFIG)
    selection = compressor.select(mixed.view(), made_queries(PROMPT))
    assert selection is not None
    assert selection.quantized is not None
    assert compressor.channel_scales is not None
    assert np.isfinite(compressor.channel_scales).all()
    decoded = [blocks[0].decode(DIM) for blocks in selection.quantized]
    assert np.abs(decoded[2][1] + 2).max() < 1e-3
    assert np.abs(decoded[1][0][:, 3]).max() < 5e-3
    for keys, values in decoded:
        assert np.isfinite(keys).all()
        assert np.isfinite(values).all()


def test_answers_to_one_prompt_are_compressed_on_their_own() -> None:
    mixed, compressor = after_prompt(MiKV(ratio=0.5, high=8), 16)
    other = compressor.fork()
    longer = MixedKeys(24)
    longer.quantized, longer.blocks = mixed.quantized, mixed.blocks
    longer.grow(16, 24)
    chosen = [one.select(longer.view(), made_queries(8)) for one in (compressor, other)]
    blocks = [one.quantized for one in chosen if one is not None and one.quantized is not None]
    assert len(blocks) == 2
    for one, twin in zip(*blocks, strict=True):
        assert [block.data.tolist() for block in one] == [block.data.tolist() for block in twin]


def test_what_was_observed_of_a_prompts_beginning_is_found_again() -> None:
    """The scores and the largest queries after a block, for the same tenant only."""
    method = MiKV()
    tokens = np.arange(100, dtype=np.int32)
    queries = made_queries(100)
    queries[:, 5] *= 10
    known, first = method.recall(tokens, "ann")
    assert known == 0
    mixed = MixedKeys(100)
    mixed.grow(0, 64)
    first.observe(mixed.view(), queries[:, :64])
    known, second = method.recall(tokens, "ann")
    assert known == 64
    mixed.grow(64, 100)
    chosen = [one.select(mixed.view(), queries[:, 64:]) for one in (first, second)]
    assert first.channel_scales is not None
    assert second.channel_scales is not None
    assert first.channel_scales.tolist() == second.channel_scales.tolist()
    assert [one.kept.tolist() for one in chosen if one] == [chosen[0].kept.tolist()] * 2  # type: ignore[union-attr]
    for one, other in zip(first.attention.scores, second.attention.scores, strict=True):
        assert one.tolist() == other.tolist()
    alone = method.start(CONFIG)
    alone.select(mixed.view(), queries)
    assert alone.channel_scales is not None
    assert alone.channel_scales.tolist() == second.channel_scales.tolist()
    assert method.recall(tokens, "bob")[0] == 0


def test_the_next_keystroke_finds_its_beginning_and_gets_the_same_bits(tmp_path: Path) -> None:
    """Scores and balancer are those of a prompt that nobody knows, for each tenant by itself."""
    checkpoint = open_checkpoint(write_variant("llama", tmp_path / "llama"))
    runner = CpuRunner.load(checkpoint, slots=600, threads=1, weights="f32", kv_cache_dtype="f32")
    params = EngineSamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    text = random.Random(0).choices(range(1, VOCAB), k=200)
    alone = {}
    for tokens in (200, 180, 150):
        one = build_engine(runner, method=MiKV(interval=8))
        alone[tokens] = serve(one, [request("r", text[:tokens], params)])["r", 0]
    one = build_engine(runner, method=MiKV(interval=8), token_budget=50)
    for tokens, tenant, cached in ((180, "a", 0), (200, "a", 128), (150, "a", 128), (150, "b", 0)):
        found = serve(one, [request("r", text[:tokens], params, tenant)])["r", 0]
        assert found.cached_tokens == cached
        assert same(found, alone[tokens])
    runner.close()


def test_channels_without_numbers_have_a_balancer_all_the_same() -> None:
    mixed = MixedKeys(8)
    mixed.keys[:] = 0
    mixed.grow(0, 8)
    found = balance(mixed.view(), np.zeros((HEADS, DIM), np.float32))
    assert found.tolist() == np.ones((HEADS, DIM)).tolist()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"ratio": -0.1}, "ratio must be"),
        ({"ratio": 1.1}, "ratio must be"),
        ({"low": 5}, "low must be 2, 3, 4 or 8 bits"),
        ({"high": 12}, "high must be 16, 8 or 4 bits"),
        ({"high": 4, "low": 8}, "not below low=8"),
        ({"recent": 2}, "recent must be"),
        ({"balance": 2}, "balance must be"),
        ({"interval": -1}, "interval must be"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        MiKV(**fields)  # type: ignore[arg-type]


def test_a_quantised_kv_cache_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="mikv quantises keys itself"):
        MiKV().for_model(ServedModel(CONFIG, kv_cache_dtype="i8"))
    assert MiKV().for_model(ServedModel(CONFIG)) == MiKV()
