"""CompressKV's measurements against plain loops, and the heads that they find."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_keys import (
    DIM,
    GROUP,
    KV_HEADS,
)
from tiny_checkpoints import write_tiny

from midfill.errors import MidfillError
from midfill.methods.calibration_store import read, shipped_path
from midfill.methods.needles import NeedleText, needle_text
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_checkpoint, open_model
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache
from midfill.runners.torch.weights import load_weights
from midfill_lab.calibration.compresskv import (
    EvidenceSearch,
    evidence_scores,
    recall,
    relative_errors,
)


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
@pytest.mark.quality
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
        for number in range(100, 104):
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
