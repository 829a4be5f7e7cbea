"""RazorAttention's scores are the paper's, against a double loop."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, reference_model, write_variant

from midfill.errors import InvalidRequestError
from midfill.methods.model_probe import ModelProbe
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.torch.runner import load_torch_runner
from midfill_lab.calibration.razorattention import HeadSearch, repetition_scores

PERIOD, REPEATS = 20, 8  # enough tokens for several chunks of rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.mark.parametrize("start", [0, 1])
def test_scores_are_the_sums_of_the_double_loop(folder: Path, start: int) -> None:
    drawn = np.random.default_rng(0).integers(0, VOCAB, PERIOD)
    text = np.array([7] * start + np.tile(drawn, REPEATS).tolist(), np.int32)
    runner = load_torch_runner(open_checkpoint(folder), slots=len(text))
    found = repetition_scores(ModelProbe(runner), text, PERIOD, start)
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


def test_models_whose_layers_see_a_window_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("mistral", tmp_path / "mistral"))
    with pytest.raises(InvalidRequestError, match="whole text"):
        HeadSearch().open(checkpoint, lambda *_: None)
