"""Products compiled for ARM's chips use the instructions that each has."""

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

PROGRAM = Path(__file__).parent / "arm_code.py"


def instructions(cpu: str, features: str = "") -> set[str]:
    """Return the names of the instructions in products compiled for a chip."""
    llvmlite.binding.initialize_all_targets()
    try:
        llvmlite.binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("LLVM was built without ARM here")
    chip = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env=os.environ | chip, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {line.split()[0] for line in done.stdout.splitlines() if line.startswith("\t")}


@pytest.mark.parametrize(("cpu", "features"), [("apple-m1", ""), ("generic", "+dotprod")])
def test_dot_products_where_the_chip_has_them(cpu: str, features: str) -> None:
    used = instructions(cpu, features)
    assert "sdot" in used
    assert "mla" not in used


def test_plain_arithmetic_where_it_has_none() -> None:
    used = instructions("neoverse-n1", "-dotprod")
    assert "mla" in used
    assert "sdot" not in used
