"""Calibrations: stored whole, refused where they don't belong."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from fake_keys import CONFIG

from midfill.errors import InvalidRequestError
from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration, CalibrationError
from midfill.methods.served_model import ServedModel

MODEL = ServedModel(config=CONFIG, digest="d" * 64, options="--model tiny")
WHOLE = Calibration("sums", 3, "d" * 64, {"count": 4}, (4, 4), {"sums": np.array([[1.5, 2.0]])})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_calibration_comes_back_as_it_was_stored(cache: Path) -> None:
    path = calibration_store.store(WHOLE)
    assert path == cache / "calibrations" / f"{'d' * 16}-sums.json"
    found = calibration_store.read(path)
    assert found is not None
    np.testing.assert_array_equal(found.tables["sums"], WHOLE.tables["sums"])
    assert dataclasses.replace(found, tables={}) == dataclasses.replace(WHOLE, tables={})
    tables = calibration_store.load_tables("sums", 3, MODEL)
    assert tables["sums"].tolist() == [[1.5, 2.0]]


def test_one_that_midfill_ships_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_store, "SHIPPED", tmp_path)
    calibration_store.shipped_path("sums", MODEL.digest).write_text(WHOLE.encode())
    assert calibration_store.load_tables("sums", 3, MODEL)["sums"].tolist() == [[1.5, 2.0]]


def test_a_missing_one_is_told_with_the_command_that_makes_it() -> None:
    command = "midfill methods calibrate sums --model tiny$"
    with pytest.raises(InvalidRequestError, match=f"has to be calibrated .* first: {command}"):
        calibration_store.load_tables("sums", 3, MODEL)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (WHOLE.encode()[:-30], "it is cut off"),
        ("", "it is cut off"),
        ("{}\n", "it is no calibration"),
        ("[1]\n", "it is no calibration"),
        (WHOLE.encode().replace("[1.5, 2.0]", "[1.5, NaN]"), "holds a value that is no number"),
        (WHOLE.encode().replace('"format": 1', '"format": 2'), "it has the format 2, not 1"),
        (dataclasses.replace(WHOLE, version=2).encode(), "it is of version 2, not 3"),
        (dataclasses.replace(WHOLE, digest="e" * 64).encode(), "of another model, or of another a"),
        (dataclasses.replace(WHOLE, method="means").encode(), "it is for the method means"),
        (dataclasses.replace(WHOLE, steps=(3, 4)).encode(), "it is not finished"),
    ],
)
def test_one_that_cant_be_used_is_told_with_the_command_that_makes_it_again(
    text: str, reason: str
) -> None:
    path = calibration_store.calibration_path("sums", MODEL.digest)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        calibration_store.load_tables("sums", 3, MODEL)
    assert str(caught.value).endswith("midfill methods calibrate sums --model tiny --again")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_told() -> None:
    path = calibration_store.calibration_path("sums", MODEL.digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="it is no text"):
        calibration_store.read(path)
