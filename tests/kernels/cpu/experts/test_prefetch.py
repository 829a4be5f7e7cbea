"""Experts on disk: the system is asked for those that a step's rows are sent to, and no others."""

import ctypes
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from tiny_checkpoints import write_variant

from midfill.kernels.cpu.experts.table import ExpertSizes
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.runner import CpuRunner

AT = ExpertSizes._fields.index("madvise")
PER_TOKEN, LAYERS = 3, 3
TOKENS = [7, 30, 12, 99, 5]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no madvise")


@pytest.fixture(
    scope="module",
    params=[("qwen2moe", False), ("qwen2moe", True), ("qwen3next", True)],
    ids=["in memory", "on disk", "on disk beside states"],
)
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuRunner]:
    folder, (family, on_disk) = tmp_path_factory.mktemp("mixture"), request.param
    checkpoint = open_checkpoint(write_variant(family, folder / "model"))
    model = load_packed(checkpoint, "q8", folder=folder / "cache", offload_experts=on_disk)
    runner = CpuRunner(checkpoint.config, model, KVCacheDtype.F32, slots=64, threads=2)
    yield runner
    runner.close()


def table(runner: CpuRunner) -> np.ndarray:
    return runner._memory.workspace.experts


def test_only_experts_on_disk_are_asked_for(runner: CpuRunner) -> None:
    assert (table(runner)[AT] != 0) == runner.model.experts_on_disk


def test_each_chosen_expert_is_asked_for_once_and_no_bit_changes(runner: CpuRunner) -> None:
    expected = Stepper(runner).prefill(Sequence(list(TOKENS)), [1] * 4)
    asked: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    def madvise(first: int, length: int, advice: int) -> int:
        asked.append((first, first + length))
        return 0

    before = table(runner)[AT]
    table(runner)[AT] = ctypes.cast(madvise, ctypes.c_void_p).value
    found = Stepper(runner).prefill(Sequence(list(TOKENS)), [1] * 4)
    table(runner)[AT] = before
    np.testing.assert_array_equal(found, expected)
    assert len(asked) == len(TOKENS) * LAYERS * PER_TOKEN * 2
    ends, experts = set(), runner.config.experts
    assert experts is not None
    for name in ("experts_in", "experts_out"):
        matrix = runner.model.matrices[name]
        starts = matrix.panels[:, 0].tolist()
        start = matrix.packed.ctypes.data
        ends |= {start + at for at in [*starts[1:], matrix.packed.nbytes]}
        size = matrix.packed.nbytes // (experts.count * LAYERS)
        own = [(first, end) for first, end in asked if start < end <= start + matrix.packed.nbytes]
        assert len(own) == len(asked) // 2
        for first, end in own:  # the expert's matrices, from the start of their first page
            assert end - 4096 * 16 - size < first <= end - size
    assert {end for _, end in asked} <= ends
