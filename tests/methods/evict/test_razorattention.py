"""RazorAttention: its heads are chosen by rank over the model."""

from pathlib import Path

import numpy as np
import pytest
from fake_keys import CONFIG, GROUP, KV_HEADS, LAYERS
from tiny_checkpoints import VOCAB, write_tiny, write_variant

from midfill import LLM, SamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.calibration_store import read, shipped_path
from midfill.methods.evict.razorattention import VERSION, RazorAttention, retrieval_heads
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_checkpoint, open_model
from midfill_lab.calibration.calibrate import calibrate


def test_heads_are_ranked_over_the_model_by_the_best_of_their_group() -> None:
    induction, echo = np.zeros((2, LAYERS, KV_HEADS * GROUP))
    induction[0, 4] = 0.9  # its KV head is the second one of the first layer
    induction[2, 0], induction[2, 8] = 0.8, 0.7
    echo[3, 3] = 0.5
    tables = {"induction": induction, "echo": echo}
    found = retrieval_heads(tables, CONFIG, induction=2 / 12, echo=1 / 12)
    assert np.flatnonzero(found).tolist() == [1, 6, 10]
    assert not retrieval_heads(tables, CONFIG, 0.0, 0.0).any()
    assert retrieval_heads(tables, CONFIG, 1.0, 0.0).all()


@pytest.mark.parametrize("seed", range(5))
def test_heads_are_those_of_a_loop_over_all_heads_of_all_layers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = dict(
        zip(("induction", "echo"), rng.random((2, LAYERS, KV_HEADS * GROUP)), strict=True)
    )
    shares = {"induction": 0.25, "echo": 0.1}
    expected = set()
    for name, share in shares.items():
        best = {}
        for layer, query_head in np.ndindex(LAYERS, KV_HEADS * GROUP):
            place = layer, query_head // GROUP
            best[place] = max(best.get(place, 0.0), tables[name][layer, query_head])
        for place, score in best.items():
            above = sum(other > score for other in best.values())
            if above < round(share * len(best)):
                expected.add(place[0] * KV_HEADS + place[1])
    found = retrieval_heads(tables, CONFIG, **shares)
    assert set(np.flatnonzero(found).tolist()) == expected


def test_a_search_is_the_same_every_time_and_is_used_by_the_model(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "llama")
    prompt = [list(np.random.default_rng(1).integers(1, VOCAB, 90))]
    method = "razorattention:induction=0.34,recent=16,share=0"
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), threads=1, kv_memory=4 << 20) as llm:
        with pytest.raises(InvalidRequestError, match="has to be calibrated") as caught:
            llm.generate(prompt, method=method)
        assert str(caught.value).endswith(f"calibrate razorattention --model {folder}")
        exact = llm.generate(prompt, greedy)[0].text
        path = calibrate("razorattention:tokens=16,draws=2", open_checkpoint(folder))
        whole = path.read_text()
        calibrate("razorattention:tokens=16,draws=2", open_checkpoint(folder), again=True)
        assert path.read_text() == whole
        assert llm.generate(prompt, greedy, method=method)[0].text != exact
        every = "razorattention:induction=1,recent=16,share=0"
        assert llm.generate(prompt, greedy, method=every)[0].text == exact
    with LLM(str(folder), threads=1, kv_memory=4 << 20, method=method) as llm:
        assert llm.generate(prompt, greedy, method="none")[0].text == exact


def test_models_whose_layers_see_a_window_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("mistral", tmp_path / "mistral"))
    model = ServedModel(config=checkpoint.config, digest="d", options="--model m")
    with pytest.raises(InvalidRequestError, match="layers of this one see 24 tokens"):
        RazorAttention().for_model(model)


@pytest.mark.real_model
def test_the_default_model_comes_with_its_heads() -> None:
    adapter = resolve_adapter(DEFAULT_MODEL, None)
    checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, adapter)
    shipped = read(shipped_path("razorattention", model_digest(checkpoint)))
    assert shipped is not None, "calibrate it and ship the file: docs/methods.md"
    shipped.check("razorattention", VERSION, model_digest(checkpoint))
    heads = retrieval_heads(shipped.tables, checkpoint.config, 0.14, 0.01)
    assert 13 <= heads.sum() <= 14
