"""calibrate: runs a method's calibration step by step, so that it can be continued."""

import dataclasses
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError
from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration, CalibrationError
from midfill.methods.kinds import unsuited
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import model_digest
from midfill.system.progress import Progress, ignore_progress
from midfill_lab.calibration.registry import resolve_calibrator


def calibrate(
    specification: str,
    checkpoint: Checkpoint,
    progress: Progress = ignore_progress,
    *,
    again: bool = False,
) -> Path:
    """Compute a method's tables for a model, unless that is done; return where they are.

    After each step its results are stored. An interrupted calibration is continued if its settings
    are the same, and gives what it would have given.

    Args:
        specification: the method's name, and options of its calibration: "NAME:OPTION=VALUE".
        checkpoint: the model.
        progress: called with (stage, done, total).
        again: begin anew, whatever there is.

    Raises:
        InvalidRequestError: there is no such method or option, or the method needs no tables.
        MidfillError: the model doesn't suit the method, or the results can't be stored.
    """
    method, calibrator = resolve_calibrator(specification)
    reason = unsuited(checkpoint.config)
    if reason is not None:
        raise MidfillError(reason)
    version = calibrator.version
    fields: Any = calibrator
    settings = dataclasses.asdict(fields)
    digest = model_digest(checkpoint)
    begun = None
    if not again:
        paths = (
            calibration_store.calibration_path(method, digest),
            calibration_store.partial_path(method, digest),
        )
        for path in paths:
            found = _usable(path, method, version, digest)
            if found is not None and dict(found.settings) == settings:
                if found.is_finished:
                    return path
                begun = found
    work = calibrator.open(checkpoint, progress)
    try:
        done = 0 if begun is None else begun.steps[0]
        tables = work.start() if begun is None else begun.tables
        while True:
            progress(f"calibrating {method}", done, work.steps)
            steps = done, work.steps
            stored = Calibration(method, version, digest, settings, steps, tables)
            path = calibration_store.store(stored)
            if stored.is_finished:
                return path
            tables = work.step(done, tables)
            done += 1
    finally:
        work.close()


def _usable(path: Path, method: str, version: int, digest: str) -> Calibration | None:
    """Return the calibration in a file, or None if there is none for this model."""
    try:
        found = calibration_store.read(path)
        if found is not None:
            found.check(method, version, digest)
    except (CalibrationError, MidfillError):
        return None
    return found
