"""Permission to use AMX: what the kernel answers, in one line."""

from pathlib import Path

import pytest
from amx_emulation import run_on_amx

PROGRAM = "from midfill.system.amx import request_amx; print(request_amx(), request_amx())"


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
    done = run_on_amx(amx_emulator, PROGRAM, permission=permission, features=None)
    assert done.stdout == f"{answer} {answer}\n"
