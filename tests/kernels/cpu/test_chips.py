"""The kernels give the same bits on every chip: with AVX-512, with AVX2, and with neither.

Kernels are compiled for the machine they run on. Here one process per older chip compiles them
for that chip, whose instructions this machine has too, and results are compared.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from numba.core.codegen import get_host_cpu_features

from midfill.kernels.cpu.simd import enabled_features

PROGRAM = Path(__file__).parent / "kernel_digests.py"


@dataclass(frozen=True)
class Chip:
    """A chip by LLVM's names, and what identifies its code.

    Attributes:
        cpu, features: passed to Numba.
        uses, lacks: instructions and registers that its products use, and don't use.
    """

    cpu: str
    features: str
    uses: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()


AVX2 = "+avx2,+fma,+f16c"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
OLDER_CHIPS = {
    "AVX-512 without VNNI": Chip(
        "skylake-avx512", AVX512, frozenset({"zmm", "pmaddubsw"}), frozenset({"vpdpbusd"})
    ),
    "AVX2": Chip(
        "haswell", AVX2, frozenset({"ymm", "pmaddubsw", "vfmadd"}), frozenset({"zmm", "vpdpbusd"})
    ),
    "SSE2": Chip("x86-64", "", lacks=frozenset({"ymm", "vfmadd", "vcvtph2ps", "pmaddubsw"})),
}
RUNNABLE = [
    name
    for name, chip in OLDER_CHIPS.items()
    if "sse2" in (host := enabled_features(get_host_cpu_features()))
    and enabled_features(chip.features) <= host
]


def digests(chip: Chip | None, *arguments: str) -> dict[str, Any]:
    """Return what the program prints, its kernels compiled for ``chip``; None is this machine."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU_")}
    if chip is not None:
        environment |= {"NUMBA_CPU_NAME": chip.cpu, "NUMBA_CPU_FEATURES": chip.features}
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module")
def results() -> Iterator[Mapping[str, Future[dict[str, Any]]]]:
    """Run the program for this chip and all that it can stand in for, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            "this": pool.submit(digests, None),
            **{name: pool.submit(digests, OLDER_CHIPS[name]) for name in RUNNABLE},
        }


@pytest.mark.slow
@pytest.mark.timeout(1200)  # all kernels are compiled for two chips at a time
@pytest.mark.parametrize("name", RUNNABLE)
def test_the_same_bits_with_other_instructions(
    results: Mapping[str, Future[dict[str, Any]]], name: str
) -> None:
    chip, older = OLDER_CHIPS[name], results[name].result()
    used = set(older["instructions"])
    assert chip.uses <= used
    assert not chip.lacks & used
    assert older["digests"] == results["this"].result()["digests"]


@pytest.mark.skipif(not RUNNABLE, reason="an instruction of x86")
def test_vnni_without_avx512_is_used_where_a_chip_has_it() -> None:
    used = digests(Chip("alderlake", f"{AVX2},+avxvnni"), "code")["instructions"]
    assert {"vpdpbusd", "ymm"} <= set(used)
    assert "zmm" not in used


@pytest.mark.parametrize(
    ("settings", "on", "off"),
    [
        ("", set(), {"avx2", "fma"}),
        ("+sse4.2,-avx", {"sse4.2"}, {"avx"}),
        ("+avx512vnni", {"avx512vnni", "avx512f", "avx2", "f16c"}, {"avx512bw", "avxvnni"}),
        ("+avx512bf16", {"avx512bf16", "avx512bw", "avx512f"}, {"avx512vnni"}),
        ("+avx512vnni,-avx512f", {"avx2"}, {"avx512f", "avx512vnni"}),
        ("+avx512vnni,+avxvnni,-fma", {"avxvnni"}, {"avx512vnni", "avx512f"}),
        ("+avx2,+avx512bw,+f16c,-avx", set(), {"avx2", "avx512bw", "f16c"}),
        ("-avx512f,+avx2,-avx512vnni", {"avx2", "avx"}, {"avx512f"}),
    ],
)
def test_a_feature_is_on_only_with_all_that_it_needs(
    settings: str, on: set[str], off: set[str]
) -> None:
    enabled = enabled_features(settings)
    assert on <= enabled
    assert not off & enabled
