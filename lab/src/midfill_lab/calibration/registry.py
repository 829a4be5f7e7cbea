"""Calibrators by method: what computes the tables that some methods need."""

import importlib
from typing import Any, ClassVar, Protocol

from midfill.errors import InvalidRequestError
from midfill.methods.calibration import Tables
from midfill.methods.registry import check_name
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.specifications import make_options
from midfill.system.extras import require
from midfill.system.progress import Progress

CALIBRATORS = {
    "compresskv": "EvidenceSearch",
    "uncomp": "EntropyMeasurement",
    "razorattention": "HeadSearch",
    "duoattention": "GateTraining",
    "minference": "PatternSearch",
    "epicache": "HiddenText",
}
"""Class of each method's ``Calibrator``, in this folder's module of the method's name."""

_NEED_TORCH = ("duoattention", "minference")


class CalibrationWork(Protocol):
    """A calibration in progress, with the model loaded."""

    @property
    def steps(self) -> int:
        """How many steps there are."""

    def start(self) -> Tables:
        """Return the tables before the first step."""

    def step(self, number: int, tables: Tables) -> Tables:
        """Return the tables after step ``number``, from 0; depends on its arguments alone."""

    def close(self) -> None:
        """Free the model."""


class Calibrator(Protocol):
    """A way of computing a method's tables: a frozen dataclass of its settings.

    Attributes:
        version: changes when the same settings give other tables.
    """

    version: ClassVar[int]

    def open(self, checkpoint: Checkpoint, progress: Progress) -> CalibrationWork:
        """Load what the work needs.

        Raises:
            MidfillError: the model doesn't suit the method, or can't be loaded.
        """


def resolve_calibrator(specification: str) -> tuple[str, Calibrator]:
    """Return the method's name and the calibrator that "name:option=value" stands for.

    Raises:
        InvalidRequestError: there is no such method or option, a value doesn't fit, or the method
            needs no calibration.
    """
    name, _, listed = specification.partition(":")
    check_name(name)
    calibrator: Calibrator = make_options(load_calibrator(name), name, listed, param="method")
    return name, calibrator


def load_calibrator(name: str) -> type[Any]:
    """Return the class of a method's calibrator.

    Raises:
        InvalidRequestError: the method needs no calibration.
        MidfillError: it needs torch, which is not installed.
    """
    if name not in CALIBRATORS:
        raise InvalidRequestError(f"{name} needs no calibration", param="method")
    if name in _NEED_TORCH:
        require(f"calibrating {name}", ["torch"], extra="torch")
    module = importlib.import_module(f"{__package__}.{name}")
    calibrator: type[Any] = getattr(module, CALIBRATORS[name])
    return calibrator
