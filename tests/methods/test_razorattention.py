"""RazorAttention: its heads are found as the paper says, and chosen by rank over the model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_keys import CONFIG, GROUP, KV_HEADS, LAYERS
from tiny_checkpoints import VOCAB, reference_model, write_tiny, write_variant

from midfill import LLM, SamplingParams
from midfill.errors import InvalidRequestError
from midfill.lab.calibration.calibrate import calibrate
from midfill.lab.calibration.razorattention import HeadSearch, repetition_scores
from midfill.methods.calibration_store import read, shipped_path
from midfill.methods.evict.razorattention import VERSION, RazorAttention, retrieval_heads
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_checkpoint, open_model
from midfill.runners.torch.runner import TorchRunner

PERIOD, REPEATS = 20, 8  # enough tokens for several chunks of rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.mark.parametrize("start", [0, 1])
def test_scores_are_the_sums_of_the_double_loop(folder: Path, start: int) -> None:
    drawn = np.random.default_rng(0).integers(0, VOCAB, PERIOD)
    text = np.array([7] * start + np.tile(drawn, REPEATS).tolist(), np.int32)
    runner = TorchRunner(open_checkpoint(folder), slots=len(text))
    found = repetition_scores(runner, text, PERIOD, start)
    with torch.inference_mode():
        tokens = torch.from_numpy(text).long()[None]
        model = reference_model(folder, context=512)
        attention = model(tokens, output_attentions=True).attentions
    for layer, weights in enumerate(attention):
        echo, induction = np.zeros(weights.shape[1]), np.zeros(weights.shape[1])
        for i in range(start + PERIOD, len(text)):
            for j in range(start, i):
                if (i - j) % PERIOD == 0:
                    echo += weights[0, :, i, j].numpy()
                    induction += weights[0, :, i, j + 1].numpy()
        queries = len(text) - start - PERIOD
        np.testing.assert_allclose(found["echo"][layer], echo / queries, atol=1e-5)
        np.testing.assert_allclose(found["induction"][layer], induction / queries, atol=1e-5)


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
    with pytest.raises(InvalidRequestError, match="whole text"):
        HeadSearch().open(checkpoint, lambda *_: None)


@pytest.mark.real_model
def test_the_default_model_comes_with_its_heads() -> None:
    adapter = resolve_adapter(DEFAULT_MODEL, None)
    checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, adapter)
    shipped = read(shipped_path("razorattention", model_digest(checkpoint)))
    assert shipped is not None, "calibrate it and ship the file: docs/methods.md"
    shipped.check("razorattention", VERSION, model_digest(checkpoint))
    heads = retrieval_heads(shipped.tables, checkpoint.config, 0.14, 0.01)
    assert 13 <= heads.sum() <= 14
