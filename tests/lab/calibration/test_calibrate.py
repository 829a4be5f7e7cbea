"""calibrate: continues where it was interrupted, and repeats nothing that is finished."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError, MidfillError
from midfill.methods import calibration_store
from midfill.methods.calibration import Tables
from midfill.methods.registry import METHODS, MethodEntry
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import model_digest, open_checkpoint
from midfill.system.progress import Progress
from midfill_lab.calibration import registry
from midfill_lab.calibration.calibrate import calibrate
from midfill_lab.calibration.registry import resolve_calibrator


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / "cache"))


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
    whole = calibrate("sums", checkpoint, lambda *step: told.append(step)).read_text()
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


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek2", "latent attention"),
        ("granitehybrid", "a state instead of KV"),
        ("gemma3n", "share their KV"),
    ],
)
def test_models_whose_kv_no_method_treats_are_refused_before_any_step(
    family: str, reason: str, tmp_path: Path, sums: list[int]
) -> None:
    with pytest.raises(MidfillError, match=reason):
        calibrate("sums", open_checkpoint(write_tiny(family, tmp_path / family)))
    assert sums == []
