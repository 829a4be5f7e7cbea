"""CompressKV: who decides, what is measured once, and what layers keep against plain loops."""

from dataclasses import replace
from pathlib import Path

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
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError
from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration
from midfill.methods.calibration_store import read, shipped_path
from midfill.methods.evict.compresskv import VERSION, CompressKV, RetrievalVotes, layer_budgets
from midfill.methods.needles import needle_text
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_checkpoint, open_model

TOKENS, WINDOW = 60, 6
EQUAL = (1.0,) * LAYERS


def made(
    heads: list[tuple[int, ...]], errors: tuple[float, ...] = EQUAL, **fields: int
) -> RetrievalVotes:
    options = {"budget": 24, "window": WINDOW, "least": 8} | fields
    return RetrievalVotes(CompressKV(**options), tuple(heads), errors)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [(0, 4, 8), tuple(range(KV_HEADS * GROUP)), (5,)])
def test_chosen_heads_vote_for_all_heads_of_their_layer(heads: tuple[int, ...]) -> None:
    keys, store = fake_keys(TOKENS)
    queries = fake_queries(WINDOW)
    selection = made([heads] * LAYERS).select(keys, queries)
    assert selection is not None
    weights = naive_attention(store, queries, TOKENS)[..., :-WINDOW]
    for layer in range(LAYERS):
        votes = np.zeros(TOKENS - WINDOW)
        for head in heads:
            sums = weights[layer, head].sum(axis=0)
            for i in range(len(sums)):
                votes[i] += sum(sums[max(0, i - 2) : i + 3]) / 5
        best = sorted(np.argsort(-votes, kind="stable")[: 24 - WINDOW].tolist())
        for kv_head in range(KV_HEADS):
            kept = kept_of(selection, layer, kv_head)
            assert kept == [*best, *range(TOKENS - WINDOW, TOKENS)]


def test_a_query_head_reads_the_kv_head_of_its_group() -> None:
    keys, store = fake_keys(TOKENS)
    store.keys[:] = 0.0
    queries = fake_queries(WINDOW)
    queries[:] = 0.0
    for kv_head in range(KV_HEADS):
        store.keys[kv_head * TOKENS + 10 * (kv_head + 1)] = 9.0
    queries[0] = 1.0
    for head in range(KV_HEADS * GROUP):
        heads = [(head,)] + [(0,)] * (LAYERS - 1)
        selection = made(heads, budget=WINDOW + 1, least=WINDOW + 1, kernel=1).select(keys, queries)
        assert selection is not None
        assert kept_of(selection, 0, 0)[0] == 10 * (head // GROUP + 1)


def test_layers_that_suffer_more_keep_more() -> None:
    keys, _ = fake_keys(TOKENS)
    selection = made([(0,)] * LAYERS, (4.0, 1.0, 2.0, 1.0)).select(keys, fake_queries(WINDOW))
    assert selection is not None
    sizes = np.diff(selection.indptr).reshape(LAYERS, KV_HEADS)
    assert sizes.sum() == 24 * LAYERS * KV_HEADS
    assert sizes[0, 0] > sizes[2, 0] > sizes[1, 0] == sizes[3, 0]


@pytest.mark.parametrize("seed", range(20))
def test_budgets_add_up_within_their_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    errors = rng.exponential(size=30) ** rng.integers(1, 5)
    mean = int(rng.integers(32, 300))
    budgets = layer_budgets(errors, mean, 32, 3 * mean)
    assert budgets.sum() == 30 * mean
    assert budgets.min() >= 32
    assert budgets.max() <= 3 * mean
    order = np.argsort(errors)
    assert (np.diff(budgets[order]) >= -1).all(), "rounding aside, more error never gets less"


def test_equal_errors_give_equal_budgets() -> None:
    for errors in (np.ones(7), np.zeros(7)):
        assert set(layer_budgets(errors, 100, 32, 300).tolist()) == {100}
    assert set(layer_budgets(np.arange(7.0), 32, 32, 96).tolist()) == {32}, "nothing to divide"


def test_needles_lie_where_the_text_says(tmp_path: Path) -> None:
    tokenizer = open_checkpoint(write_tiny("llama", tmp_path / "llama")).tokenizer
    depths = []
    for number in range(15):
        text = needle_text(tokenizer, 400, 4, number, seed=0)
        first, end = text.needle
        needle = tokenizer.decode(text.token_ids[first:end].tolist())
        whole = tokenizer.decode(text.token_ids.tolist())
        assert needle.strip().startswith("# The")
        assert needle.strip().endswith(tokenizer.decode(text.answer.tolist()).strip())
        assert whole.endswith("passkey is")
        depths.append(first / len(text.token_ids))
    assert min(depths) < 0.3 < 0.6 < max(depths)
    again = needle_text(tokenizer, 400, 4, 3, seed=0)
    assert again.token_ids.tolist() == needle_text(tokenizer, 400, 4, 3, 0).token_ids.tolist()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"budget": 8}, "above the 8 tokens"),
        ({"heads": 0}, "heads"),
        ({"least": 8}, "least"),
        ({"most": 0.5}, "most"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        CompressKV(**fields)  # type: ignore[arg-type]


def test_tables_that_lack_a_layer_are_refused() -> None:
    tables = {
        "heads": np.ones((LAYERS - 1, KV_HEADS * GROUP)),
        "errors": np.ones(LAYERS),
        "counted": np.ones(1),
    }
    calibration_store.store(Calibration("compresskv", VERSION, "f" * 64, {}, (1, 1), tables))
    with pytest.raises(InvalidRequestError, match="other layers or heads"):
        CompressKV().for_model(ServedModel(config=CONFIG, digest="f" * 64))


def test_of_layers_with_a_window_no_tables_are_read() -> None:
    mixed = replace(CONFIG, sliding_window=6, windowed_layers=(0, 2))
    heads = np.zeros((LAYERS, KV_HEADS * GROUP))
    heads[np.arange(LAYERS), np.arange(LAYERS)] = 1
    tables = {"heads": heads, "errors": np.arange(LAYERS, dtype=np.float64), "counted": np.ones(1)}
    calibration_store.store(Calibration("compresskv", VERSION, "e" * 64, {}, (1, 1), tables))
    found = CompressKV(heads=1).for_model(ServedModel(config=mixed, digest="e" * 64))
    assert isinstance(found, RetrievalVotes)
    assert (found.heads, found.errors) == (((1,), (3,)), (1.0, 3.0))


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["compresskv", "uncomp"])
def test_the_default_model_comes_with_its_tables(name: str) -> None:
    adapter = resolve_adapter(DEFAULT_MODEL, None)
    checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, adapter)
    shipped = read(shipped_path(name, model_digest(checkpoint)))
    assert shipped is not None, "calibrate it and ship the file: docs/methods.md"
    shipped.check(name, 1, model_digest(checkpoint))
    assert shipped.is_finished
