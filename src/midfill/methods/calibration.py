"""Calibration: tables that a method computes once for a model, as numbers in one JSON file.

Nothing here touches the disk, see ``calibration_store``. What computes them is in
``lab.calibration``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from midfill.arrays import Float64Array

Tables = Mapping[str, Float64Array]
"""Arrays by name. Those of a method that ranks heads are [layers, kv_heads]."""

_FORMAT = 1


class CalibrationError(Exception):
    """A calibration that can't be used; the message says why, without naming its file."""


@dataclass(frozen=True)
class Calibration:
    """What a method has computed for a model.

    Attributes:
        method: its name.
        version: of the way it computes; tables of another version are not used.
        digest: of the model, see ``model_digest``.
        settings: what the tables depend on beside the model.
        steps: how many steps of the work are done, and how many there are.
        tables: the results; before the last step, what the next one continues from.
    """

    method: str
    version: int
    digest: str
    settings: Mapping[str, Any]
    steps: tuple[int, int]
    tables: Tables

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.steps[0] == self.steps[1]

    def encode(self) -> str:
        """Return the text of its file."""
        plain = {
            "format": _FORMAT,
            "method": self.method,
            "version": self.version,
            "model": self.digest,
            "settings": dict(self.settings),
            "steps": list(self.steps),
            "tables": {name: table.tolist() for name, table in self.tables.items()},
        }
        return json.dumps(plain) + "\n"

    @classmethod
    def decode(cls, text: str) -> "Calibration":
        """Return what a file's text says.

        Raises:
            CalibrationError: it is cut off, of another format, or no calibration.
        """
        try:
            plain = json.loads(text)
            if plain["format"] != _FORMAT:
                raise CalibrationError(f"it has the format {plain['format']}, not {_FORMAT}")
            done, steps = map(int, plain["steps"])
            return cls(
                method=str(plain["method"]),
                version=int(plain["version"]),
                digest=str(plain["model"]),
                settings=dict(plain["settings"]),
                steps=(done, steps),
                tables={
                    str(name): np.array(table, np.float64)
                    for name, table in plain["tables"].items()
                },
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            whole = text.endswith("\n")
            raise CalibrationError(
                f"it is no calibration ({error})" if whole else "it is cut off"
            ) from None

    def check(self, method: str, version: int, digest: str) -> None:
        """Check that it is a method's for a model.

        Raises:
            CalibrationError: it belongs to something else, or holds a value that is no number.
        """
        if self.method != method:
            raise CalibrationError(f"it is for the method {self.method}")
        if self.version != version:
            raise CalibrationError(f"it is of version {self.version}, not {version}")
        if self.digest != digest:
            raise CalibrationError("it is of another model, or of another adapter")
        for name, table in self.tables.items():
            if not np.isfinite(table).all():
                raise CalibrationError(f"its table {name!r} holds a value that is no number")
