"""midfill-lab: what it declares agrees with midfill."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import typer

import midfill_lab
from midfill.cli.app import app
from midfill.methods.registry import METHODS
from midfill.version import __version__
from midfill_lab.calibration.registry import CALIBRATORS

ROOT = Path(__file__).parents[2]
LAB, WHOLE = (
    tomllib.loads((ROOT / file).read_text("utf-8"))["project"]
    for file in ("lab/pyproject.toml", "pyproject.toml")
)


def test_both_have_one_version() -> None:
    assert midfill_lab.__version__ == __version__ == WHOLE["version"]
    assert f"midfill=={__version__}" in LAB["dependencies"]


def test_extras_of_midfill_bring_the_lab() -> None:
    for names in (WHOLE["optional-dependencies"]["bench"], WHOLE["optional-dependencies"]["train"]):
        (name,) = names
        own, _, extra = name.rstrip("]").partition("[")
        assert own == LAB["name"]
        assert not extra or extra in LAB["optional-dependencies"]


def test_torch_has_one_range_and_is_named_before_what_needs_it() -> None:
    """In another order, pip fetches the newest torch, gigabytes of it, before it takes this one."""
    (of_midfill,) = (
        name for name in WHOLE["optional-dependencies"]["torch"] if name.startswith("torch")
    )
    of_lab = LAB["optional-dependencies"]["train"]
    assert of_lab.index(of_midfill) < min(
        of_lab.index(name) for name in of_lab if name.startswith(("accelerate", "peft"))
    )


def test_its_commands_are_commands_of_midfill() -> None:
    declared = LAB["entry-points"]["midfill.commands"]
    assert {entry.name for entry in entry_points(group="midfill.commands")} == declared.keys()
    root = typer.main.get_command(app)
    for name in declared:
        command = root
        for part in name.split("."):
            command = command.commands[part]  # type: ignore[attr-defined]
        assert "Needs midfill-lab" not in str(command.help)


def test_what_has_a_calibrator_says_so() -> None:
    assert {entry.name for entry in METHODS.values() if entry.calibrated} == CALIBRATORS.keys()
