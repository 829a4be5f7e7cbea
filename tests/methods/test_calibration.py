"""Calibrations: stored whole, continued where they were, refused where they don't belong."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from fake_keys import CONFIG

from midfill.errors import InvalidRequestError
from midfill.lab.calibration import registry
from midfill.lab.calibration.calibrate import calibrate
from midfill.lab.calibration.registry import resolve_calibrator
from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration, CalibrationError, Tables
from midfill.methods.registry import METHODS, MethodEntry
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import model_digest, open_checkpoint
from midfill.system.progress import Progress

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


@dataclass(frozen=True)
class Sums:
    """A calibrator whose tables show which steps they come from; ``fails_at`` interrupts it."""

    count: int = 4
    version: ClassVar[int] = 3
    fails_at: ClassVar[int | None] = None
    ran: ClassVar[list[int]] = []

    def open(self, checkpoint: Checkpoint, progress: Progress) -> "Sums":
        return self

    @property
    def steps(self) -> int:
        return self.count

    def start(self) -> Tables:
        return {"sums": np.zeros(2)}

    def step(self, number: int, tables: Tables) -> Tables:
        if number == Sums.fails_at:
            raise KeyboardInterrupt
        Sums.ran.append(number)
        return {"sums": tables["sums"] * 2 + number}

    def close(self) -> None:
        Sums.ran.append(-1)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    entry = MethodEntry("sums", "evict", "Sums", "nowhere", __name__, "Sums")
    monkeypatch.setattr(registry, "load_calibrator", lambda name: Sums)
    monkeypatch.setitem(METHODS, "sums", entry)
    Sums.ran.clear()
    yield Sums.ran
    Sums.fails_at = None


@pytest.fixture
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


def test_an_interrupted_calibration_continues_and_gives_the_same(
    sums: list[int], checkpoint: Checkpoint
) -> None:
    told: list[tuple[str, int, int]] = []
    whole = calibrate("sums", checkpoint, lambda *one: told.append(one)).read_text()
    assert told == [("calibrating sums", done, 4) for done in range(5)]
    assert sums == [0, 1, 2, 3, -1]
    Sums.fails_at = 2
    with pytest.raises(KeyboardInterrupt):
        calibrate("sums", checkpoint, again=True)
    Sums.fails_at = None
    sums.clear()
    calibration_store.calibration_path("sums", model_digest(checkpoint)).unlink()
    path = calibrate("sums", checkpoint)
    assert sums == [2, 3, -1]
    assert path.read_text() == whole
    assert not calibration_store.partial_path("sums", model_digest(checkpoint)).exists()


def test_a_finished_calibration_is_not_repeated_unless_it_is_asked_for(
    sums: list[int], checkpoint: Checkpoint
) -> None:
    path = calibrate("sums", checkpoint)
    sums.clear()
    assert calibrate("sums", checkpoint) == path
    assert sums == []
    calibrate("sums:count=2", checkpoint)
    assert sums == [0, 1, -1]
    calibrate("sums:count=2", checkpoint, again=True)
    assert sums == [0, 1, -1] * 2


def test_a_broken_file_is_replaced(sums: list[int], checkpoint: Checkpoint) -> None:
    path = calibrate("sums", checkpoint)
    whole = path.read_text()
    path.write_text(whole[:40])
    assert calibrate("sums", checkpoint).read_text() == whole


@pytest.mark.parametrize(
    ("specification", "error"),
    [
        ("snapkv", "snapkv needs no calibration"),
        ("razor", "no method 'razor'; did you mean 'razorattention'"),
        ("razorattention:token=3", "no option 'token'; did you mean 'tokens'"),
        ("razorattention:repeats=1", "repeats must be at least 2"),
    ],
)
def test_nonsense_is_refused(specification: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        resolve_calibrator(specification)
