"""EpiCache's options, and what it needs to know of a model."""

from dataclasses import replace

import numpy as np
import pytest
from fake_keys import CONFIG

from midfill.errors import InvalidRequestError
from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration
from midfill.methods.episodes.epicache import INSTRUCTION, NAME, VERSION, EpiCache
from midfill.methods.registry import resolve_method
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_model


def encode(text: str) -> list[int]:
    return [1 + len(word) % 8 for word in text.split()]


MODEL = ServedModel(CONFIG, digest="ab" * 32, token_bytes=lambda token: b"a", encode=encode)


def test_options_arrive() -> None:
    method = resolve_method(
        "epicache:budget=96,block=128,episodes=3,turns=2,near=5,heads=equal,sinks=8,system=1,grow=1"
    )
    assert isinstance(method, EpiCache)
    found = method.for_model(MODEL)
    rule = found.rule
    assert (rule.budget, rule.block, rule.episodes, rule.turns, rule.near) == (96, 128, 3, 2, 5)
    assert (rule.sinks, rule.system, rule.pooled, rule.grows) == (8, True, False, True)
    assert found.instruction.tolist() == encode(INSTRUCTION)
    assert found.budgets(1000).tolist() == [96] * CONFIG.layers


def test_a_sentence_encoder_is_given_the_text_of_tokens() -> None:
    assert EpiCache().for_model(MODEL).encode is None
    texts = []

    def embed(text: str) -> np.ndarray:
        texts.append(text)
        return np.array([0.6, 0.8], np.float32)

    letters = [b"\xc3", b"\xa9", b" te", b"", b"\xff"]
    served = replace(MODEL, token_bytes=letters.__getitem__, embed=embed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("midfill.methods.episodes.epicache.TurnReader.of", lambda *_: None)
        encode = EpiCache().for_model(served).encode
    assert encode is not None
    found = encode(np.array([2, 0, 1, 3, 4], np.int32))
    assert found.dtype == np.float64
    assert texts == [" te\u00e9\ufffd"], "bytes make characters together; others are marked"


def test_other_scorers_have_a_single_cache() -> None:
    served = replace(MODEL, embed=lambda _: np.ones(1, np.float32))
    for scorer in ("summary", "window", "random"):
        method = EpiCache(scorer=scorer).for_model(served)
        assert method.rule.episodes == 1
        assert method.encode is None, "there is nothing to choose"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("budget=4", "budget must be above the 4 tokens that are always kept"),
        ("block=0", "block must be at least 1, not 0"),
        ("episodes=0", "episodes must be at least 1, not 0"),
        ("turns=-1", "turns must be at least 1, not -1"),
        ("sinks=0", "sinks must be at least 1, not 0"),
        ("memory=0", "memory must be at least 1, not 0"),
        ("alpha=-1", "alpha must be 0 or more, not -1"),
        ("heads=some", "heads must be pooled or equal, not 'some'"),
        ("scorer=best", "scorer must be episode, summary, window or random, not 'best'"),
        ("system=2", "system must be 0 or 1, not 2"),
    ],
)
def test_nonsense_is_refused_in_one_line(options: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        resolve_method(f"epicache:{options}")


def test_uneven_layers_need_a_calibration() -> None:
    method = EpiCache(budget=100, alpha=1.1)
    with pytest.raises(InvalidRequestError, match="midfill methods calibrate epicache"):
        method.for_model(MODEL)
    similarity = np.linspace(0.9, 0.5, CONFIG.layers)
    calibration_store.store(
        Calibration(NAME, VERSION, MODEL.digest, {}, (1, 1), {"similarity": similarity})
    )
    budgets = method.for_model(MODEL).budgets(1000)
    assert (np.diff(budgets) > 0).all()  # the more keys change, the more stay
    assert budgets[0] == 25
    other = replace(CONFIG, layers=CONFIG.layers + 1)
    with pytest.raises(InvalidRequestError, match="of a model with other layers"):
        method.for_model(replace(MODEL, config=other))


def test_models_without_text_or_with_windows_everywhere_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="finds turns by the text of tokens"):
        EpiCache().for_model(replace(MODEL, token_bytes=None))
    with pytest.raises(InvalidRequestError, match="layers see the whole text"):
        EpiCache().for_model(replace(MODEL, config=replace(CONFIG, sliding_window=64)))


@pytest.mark.real_model
def test_the_default_model_comes_with_its_table() -> None:
    adapter = resolve_adapter(DEFAULT_MODEL, None)
    digest = model_digest(open_model(REGISTERED[DEFAULT_MODEL].path, adapter))
    shipped = calibration_store.read(calibration_store.shipped_path(NAME, digest))
    assert shipped is not None, "calibrate it and ship the file: docs/methods.md"
    shipped.check(NAME, VERSION, digest)
    assert shipped.is_finished
