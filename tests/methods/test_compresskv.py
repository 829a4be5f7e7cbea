"""CompressKV: who decides, what is measured once, and what layers keep against plain loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

from midfill.errors import InvalidRequestError, MidfillError
from midfill.lab.calibration.compresskv import (
    EvidenceSearch,
    evidence_scores,
    recall,
    relative_errors,
)
from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration
from midfill.methods.calibration_store import read, shipped_path
from midfill.methods.evict.compresskv import VERSION, CompressKV, RetrievalVotes, layer_budgets
from midfill.methods.needles import NeedleText, needle_text
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_checkpoint, open_model
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache
from midfill.runners.torch.weights import load_weights

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


def test_tokens_of_the_needle_credit_the_attention_to_all_of_it() -> None:
    text = NeedleText(np.array([7, 1, 2, 2, 9, 7], np.int32), (1, 4), np.array([2, 1]))
    answer = np.array([2, 7, 1])
    weights = np.random.default_rng(0).random((4, 3, 8)).astype(np.float32)
    expected = np.zeros(4)
    for head in range(4):
        for row, token in enumerate(answer):
            for place in range(1, 4):
                if text.token_ids[place] == token:
                    expected[head] += weights[head, row, 1:4].sum()
    found = evidence_scores(weights, answer, text)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (found >= 0).all()


def test_recall_counts_tokens_as_often_as_they_are_expected() -> None:
    expected = np.array([1, 1, 2, 3])
    assert recall(np.array([1, 2, 2, 9]), expected) == 0.5
    assert recall(np.array([], np.int32), expected) == 0
    assert recall(expected, expected) == 1


def test_errors_are_measured_after_the_output_projection() -> None:
    rng = np.random.default_rng(0)
    whole = [rng.normal(size=(GROUP, 5, DIM)).astype(np.float32) for _ in range(KV_HEADS)]
    part = [each + np.float32(0.1) for each in whole]
    output = rng.normal(size=(16, KV_HEADS * GROUP * DIM)).astype(np.float32)
    expected = 0.0
    for row in range(5):
        full = output @ np.concatenate([head[i, row] for head in whole for i in range(GROUP)])
        few = output @ np.concatenate([head[i, row] for head in part for i in range(GROUP)])
        expected += np.linalg.norm(few - full) / np.linalg.norm(full)
    assert relative_errors(whole, part, output) == pytest.approx(expected, rel=1e-3)
    assert relative_errors(whole, whole, output) == 0


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


def test_a_model_that_answers_nothing_has_no_heads_to_rank(tmp_path: Path) -> None:
    """Random weights copy no needle: failed answers add nothing."""
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path / "llama"))
    work = EvidenceSearch(samples=2, outputs=1, tokens=300).open(checkpoint, lambda *_: None)
    tables = work.start()
    for number in range(2):
        tables = work.step(number, tables)
    assert not tables["heads"].any()
    with pytest.raises(MidfillError, match="answered none of 2 questions"):
        work.step(2, tables)
    errors = work.step(2, {**tables, "counted": np.ones(1)})["errors"]
    assert (errors > 0).all(), "few tokens give another output in every layer"
    work.close()


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


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["compresskv", "uncomp"])
def test_the_default_model_comes_with_its_tables(name: str) -> None:
    adapter = resolve_adapter(DEFAULT_MODEL, None)
    checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, adapter)
    shipped = read(shipped_path(name, model_digest(checkpoint)))
    assert shipped is not None, "calibrate it and ship the file: docs/methods.md"
    shipped.check(name, 1, model_digest(checkpoint))
    assert shipped.is_finished


class MaskedDecoder(Decoder):
    """A decoder some of whose query heads attend to nothing."""

    masked: frozenset[tuple[int, int]] = frozenset()

    def attend(self, index: int, *arguments: Any) -> torch.Tensor:
        attended = super().attend(index, *arguments)
        for layer, head in self.masked:
            if layer == index:
                attended[:, head] = 0
        return attended


@pytest.mark.slow
@pytest.mark.real_model
def test_without_its_best_heads_the_default_model_finds_no_evidence() -> None:
    """Ten heads of 270; without ten others it loses far less."""
    checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, resolve_adapter(DEFAULT_MODEL, None))
    shipped = read(shipped_path("compresskv", model_digest(checkpoint)))
    assert shipped is not None
    config, heads = checkpoint.config, shipped.tables["heads"]
    weights = load_weights(checkpoint, torch.device("cpu"), torch.float32)
    cache = KVCache.empty(config, 800, torch.device("cpu"), torch.float32)
    decoder = MaskedDecoder(config, weights, cache)

    def answer_logprob(numbers: list[int]) -> float:
        """Mean log probability of answers to texts that the search has not seen."""
        decoder.masked = frozenset(divmod(number, config.query_heads) for number in numbers)
        found = []
        for number in range(100, 106):
            text = needle_text(checkpoint.tokenizer, 600, 8, number, seed=0)
            ids = np.concatenate((text.token_ids, text.answer)).astype(np.int32)
            places = np.arange(len(ids), dtype=np.int32)
            ends = np.array([0, len(ids)], np.int32)
            rows = places[len(text.token_ids) - 1 : -1]
            batch = ForwardBatch(ids, places, places, ends, ends, places, rows)
            with torch.inference_mode():
                hidden = decoder.embed(batch)
                hidden = decoder.run_layers(decoder.prepare(batch), hidden, 0, config.layers)
                scores = decoder.compute_logits(batch, hidden).log_softmax(-1)
            expected = torch.from_numpy(text.answer).long()
            found.append(float(scores[torch.arange(len(rows)), expected].mean()))
        return sum(found) / len(found)

    whole = answer_logprob([])
    best = np.argsort(-heads.reshape(-1))[:10].tolist()
    loss = whole - answer_logprob(best)
    for seed in range(3):
        others = np.random.default_rng(seed).permutation(heads.size)[:10].tolist()
        assert loss > 3 * (whole - answer_logprob(others))
