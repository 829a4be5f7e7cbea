"""AMX is used where chip and kernel allow it, never where they don't, and changes no answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from amx_emulation import run_on_amx

PROGRAM = Path(__file__).parents[1] / "start_program.py"
CHOICE = """
import logging
from midfill.errors import MidfillError
from midfill.runners.cpu.amx import choose_amx
logging.basicConfig(format="%(message)s", level=logging.INFO)
try:
    print(choose_amx().value, choose_amx().value)
except MidfillError as error:
    print(error)
"""
UNUSED = (
    "this chip has AMX, which is not used: its products have run on an emulator alone so far;"
    " MIDFILL_AMX=auto uses it where it is measured to be faster\n"
)
DENIED = (
    "this chip has AMX, but the system denies it to this process (Operation not permitted):"
    " products use other instructions\n"
)


@pytest.mark.parametrize(
    ("permission", "features", "wanted", "answer", "log"),
    [
        ("granted", "+amx-tile,+amx-int8", None, "off off", UNUSED),
        ("granted", "+amx-tile,+amx-int8", "auto", "auto auto", ""),
        ("granted", "+amx-tile,+amx-int8", "on", "on on", ""),
        ("granted", "+amx-tile,+amx-int8", "off", "off off", ""),
        ("denied", "+amx-tile,+amx-int8", "auto", "off off", DENIED),
        ("denied", "+amx-tile,+amx-int8", "off", "off off", ""),
        ("granted", "+amx-tile,+amx-bf16", "auto", "off off", ""),
        ("granted", "+amx-tile,+amx-int8,-amx-tile", "auto", "off off", ""),
        ("granted", None, None, "off off", ""),
        (
            "granted", None, "on",
            "MIDFILL_AMX=on is not possible: this chip has no AMX; use auto or off", "",
        ),
        (
            "denied", "+amx-tile,+amx-int8", "on",
            "MIDFILL_AMX=on is not possible: this chip has AMX, but the system denies it to this"
            " process (Operation not permitted); use auto or off", "",
        ),
        (
            "granted", None, "yes",
            "MIDFILL_AMX=yes is not known: it can be auto, on or off", "",
        ),
    ],
)  # fmt: skip
def test_amx_is_chosen_by_chip_kernel_and_user(
    amx_emulator: Path, permission: str, features: str | None, wanted: str | None, answer: str,
    log: str,
) -> None:  # fmt: skip
    wishes = {} if wanted is None else {"MIDFILL_AMX": wanted}
    done = run_on_amx(amx_emulator, CHOICE, permission=permission, features=features, **wishes)
    assert (done.stdout, done.stderr) == (f"{answer}\n", log)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the forward pass is compiled for a chip with AMX
def test_a_model_answers_the_same_on_amx(
    amx_emulator: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    def started(permission: str, wanted: str) -> Any:
        done = run_on_amx(
            amx_emulator, PROGRAM, str(tiny_folder), "2", permission=permission,
            MIDFILL_AMX=wanted, MIDFILL_CACHE=str(tmp_path),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    on, _ = started("granted", "on")
    assert on["description"] == "CPU kernels, 2 threads, AMX"
    measured, _ = started("granted", "auto")
    off, _ = started("granted", "off")
    denied, said = started("denied", "auto")
    assert DENIED in said
    for other in (measured, off, denied):
        assert (other["tokens"], other["logits"]) == (on["tokens"], on["logits"])
        assert not other["compiled"]
    for other in (off, denied):
        assert other["description"] == "CPU kernels, 2 threads"


ASK_TWICE = "from midfill.runners.cpu.amx import request_amx; print(request_amx(), request_amx())"


@pytest.mark.parametrize(
    ("permission", "answer"),
    [
        ("granted", "None"),
        ("denied", "Operation not permitted"),
        ("full", "a thread's signal stack has no room for the tiles"),
        ("retracted", "the kernel has not granted what it agreed to"),
    ],
)
def test_the_kernels_answer(amx_emulator: Path, permission: str, answer: str) -> None:
    done = run_on_amx(amx_emulator, ASK_TWICE, permission=permission, features=None)
    assert done.stdout == f"{answer} {answer}\n"
