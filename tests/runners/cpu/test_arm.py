"""On an emulated ARM chip, the forward pass and the sampler give the bits that they give here.

Each format of KV has a forward pass of its own, which the emulated chip compiles in minutes, so
only the default one is compared; ARM_KV_CACHE_DTYPES="F16 BF16 I8 F32" names others.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from arm_emulation import UnavailableError, arm_root, run_on_arm

import midfill

PROGRAM = Path(__file__).parent / "seeded_steps.py"
SOURCES = Path(midfill.__file__).parents[1]
FORMATS = os.environ.get("ARM_KV_CACHE_DTYPES", "F16").split()


def printed(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the emulated chip compiles all kernels, unless they are in the cache
def test_the_same_bits_on_arm() -> None:
    try:
        root = arm_root()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    here = printed(
        subprocess.run(
            [sys.executable, PROGRAM, *FORMATS], capture_output=True, text=True, check=False
        )
    )
    there = printed(run_on_arm(root, PROGRAM, FORMATS, SOURCES))
    assert there["machine"] == "aarch64"
    assert there["dot_products"]
    assert there["ticks"] > 0
    assert [*here["results"]] == FORMATS
    assert there["results"] == here["results"]
