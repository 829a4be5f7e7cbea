"""EpiCache's measurement: what it hides, what it compares, and that it repeats."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError
from midfill.methods.calibration_store import read
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.system.progress import ignore_progress
from midfill_lab.calibration.calibrate import calibrate
from midfill_lab.calibration.epicache import HiddenText, prose, seen_by, similarities
from midfill_lab.calibration.registry import resolve_calibrator

SMALL = HiddenText(texts=2, tokens=300, block=64, first=4)


def test_rows_see_the_first_tokens_and_half_of_the_block_before() -> None:
    assert seen_by(0, SMALL).tolist() == []
    assert seen_by(128, SMALL).tolist() == [0, 1, 2, 3, *range(96, 128)]
    assert seen_by(20, SMALL).tolist() == list(range(20))


def test_similarity_is_the_mean_cosine_of_runs_of_keys() -> None:
    one, other = np.random.default_rng(0).normal(size=(2, 3, 2, 25, 4)).astype(np.float32)
    expected = []
    for layer in range(3):
        found = []
        for head in range(2):
            for start in (0, 10, 20):
                a = one[layer, head, start : start + 10].ravel()
                b = other[layer, head, start : start + 10].ravel()
                found.append(float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b)))
        expected.append(np.mean(found))
    np.testing.assert_allclose(similarities(one, other, 10), expected, rtol=1e-5)
    np.testing.assert_allclose(similarities(one, one, 10), 1)


def test_the_first_layer_sees_nothing_of_what_is_hidden(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path / "llama"))
    work = SMALL.open(checkpoint, ignore_progress)
    found = work.step(0, work.start())["similarity"]
    work.close()
    assert found[0] == pytest.approx(1)
    assert (found[1:] < 0.999).all()
    near = replace(SMALL, first=300).open(checkpoint, ignore_progress)
    np.testing.assert_allclose(near.step(0, near.start())["similarity"], 1, atol=1e-6)
    near.close()


def test_a_measurement_is_the_same_every_time(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("llama", tmp_path / "llama"))
    settings = "epicache:texts=2,tokens=300,block=64,first=4"
    path = calibrate(settings, checkpoint)
    whole = path.read_text()
    assert calibrate(settings, checkpoint, again=True).read_text() == whole
    found = read(path)
    assert found is not None
    assert found.tables["similarity"].shape == (checkpoint.config.layers,)


def test_texts_are_prose_and_differ() -> None:
    texts = [prose(number, SMALL) for number in range(3)]
    assert len(set(texts)) == 3
    assert all(len(text) == 8 * SMALL.tokens for text in texts)
    assert prose(1, SMALL) == texts[1]


def test_nonsense_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidRequestError, match="tokens must be above two blocks"):
        resolve_calibrator("epicache:tokens=100")
    with pytest.raises(InvalidRequestError, match="texts must be at least 1"):
        resolve_calibrator("epicache:texts=0")
