"""Where calibrations are, by model digest: in the cache folder, or shipped with midfill."""

from pathlib import Path

from midfill.errors import InvalidRequestError, MidfillError
from midfill.methods.calibration import Calibration, CalibrationError, Tables
from midfill.methods.served_model import ServedModel
from midfill.system.cache import cache_folder
from midfill.system.files import write_file

SHIPPED = Path(__file__).parent / "calibrations"
"""Calibrations of models that midfill ships adapters for."""

_DIGEST_CHARACTERS = 16


def calibration_path(method: str, digest: str) -> Path:
    """Return where a calibration is stored on this machine."""
    return cache_folder() / "calibrations" / _name(method, digest)


def partial_path(method: str, digest: str) -> Path:
    """Return where an unfinished calibration is stored."""
    return calibration_path(method, digest).with_suffix(".partial.json")


def shipped_path(method: str, digest: str) -> Path:
    """Return where midfill ships a calibration, if it does."""
    return SHIPPED / _name(method, digest)


def store(calibration: Calibration) -> Path:
    """Write a calibration, complete or not at all; return where.

    A finished one replaces the unfinished one.

    Raises:
        MidfillError: the cache folder can't be written.
    """
    method, digest = calibration.method, calibration.digest
    partial = partial_path(method, digest)
    path = calibration_path(method, digest) if calibration.is_finished else partial
    write_file(path, calibration.encode())
    if calibration.is_finished:
        partial.unlink(missing_ok=True)
    return path


def read(path: Path) -> Calibration | None:
    """Read a calibration; None if there is no file.

    Raises:
        CalibrationError: the file is no calibration.
        MidfillError: it can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise CalibrationError("it is no text") from None
    except OSError as error:
        raise MidfillError(f"{path}: can't be read: {error.strerror or error}") from None
    return Calibration.decode(text)


def load_tables(method: str, version: int, model: ServedModel) -> Tables:
    """Return a method's tables for a model: this machine's, or those that midfill ships.

    Raises:
        InvalidRequestError: there are none that can be used; says which command makes them.
    """
    command = f"midfill methods calibrate {method} {model.options}".rstrip()
    for path in (calibration_path(method, model.digest), shipped_path(method, model.digest)):
        try:
            found = read(path)
            if found is None:
                continue
            found.check(method, version, model.digest)
            if not found.is_finished:
                raise CalibrationError("it is not finished")
        except CalibrationError as error:
            raise InvalidRequestError(
                f"{method}: {path} can't be used: {error}; make it again: {command} --again",
                param="method",
            ) from None
        return found.tables
    raise InvalidRequestError(
        f"{method} has to be calibrated for this model first: {command}", param="method"
    )


def _name(method: str, digest: str) -> str:
    return f"{digest[:_DIGEST_CHARACTERS]}-{method}.json"
