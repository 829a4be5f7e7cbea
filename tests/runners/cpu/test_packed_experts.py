"""Packed experts: in memory once, in the order of their panels, and of shapes that kernels run."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import CheckpointError, MidfillError
from midfill.kernels.cpu.weight_formats import PANEL
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.packed_arrays import ArrayWriter
from midfill.runners.cpu.packed_model import PackedModel, load_packed, unsupported_reason
from midfill.runners.cpu.weight_packing import packed_size


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("packed")
    checkpoint = open_checkpoint(write_variant("qwen3moe-dense-layers", folder / "model"))
    return load_packed(checkpoint, "q8", folder=folder / "cache")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_experts_that_stay_on_disk_are_the_same(packed: PackedModel, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("qwen3moe-dense-layers", tmp_path / "model"))
    size = packed_size(checkpoint, "q8")
    for _ in ("packed", "from the cache"):
        mapped = load_packed(checkpoint, "q8", folder=tmp_path / "cache", offload_experts=True)
        for name, matrix in mapped.matrices.items():
            np.testing.assert_array_equal(matrix.packed, packed.matrices[name].packed)
            np.testing.assert_array_equal(matrix.panels, packed.matrices[name].panels)
    on_disk = [mapped.matrices[name].packed for name in ("experts_in", "experts_out")]
    assert size.experts == sum(matrix.nbytes for matrix in on_disk)
    every = {
        id(m.packed): m.packed.nbytes for name, m in mapped.matrices.items() if name != "router"
    }
    assert size.total == sum(every.values())
    file = next((tmp_path / "cache").glob("*.safetensors"))
    assert mapped_bytes(file) >= size.experts


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_read_into_memory_maps_no_file(packed: PackedModel, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("qwen3moe-dense-layers", tmp_path / "model"))
    load_packed(checkpoint, "q8", folder=tmp_path / "cache")
    assert mapped_bytes(next((tmp_path / "cache").glob("*.safetensors"))) == 0


def mapped_bytes(file: Path) -> int:
    """Return how many bytes of a file this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            first, end = line.split()[0].split("-")
            total += int(end, 16) - int(first, 16)
    return total


def test_a_full_disk_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(writer: ArrayWriter, name: str, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ArrayWriter, "make", fail)
    checkpoint = open_checkpoint(write_variant("qwen3moe-dense-layers", tmp_path / "model"))
    with pytest.raises(MidfillError, match=r"can't be written there \(No space left on device"):
        load_packed(checkpoint, "q8", folder=tmp_path / "cache", offload_experts=True)
    assert not list((tmp_path / "cache").iterdir())


def test_an_experts_gate_and_up_are_one_run_of_memory(packed: PackedModel) -> None:
    experts = packed.experts
    assert experts is not None
    steps = np.diff(experts.gate_up.panels[:, 0])
    assert (steps == steps[0]).all()
    assert len(experts.gate_up.panels) == 2 * 8 * 2 * 96 // PANEL  # layers, experts, gate and up
    assert len(experts.down.panels) == 2 * 8 * 64 // PANEL


def test_each_weight_is_in_memory_once(packed: PackedModel) -> None:
    in_memory = {id(m.packed): m.packed.nbytes for m in packed.matrices.values()}
    stored = [matrix.stored_bytes for matrix in packed.matrices.values()]
    assert sum(in_memory.values()) == sum(stored)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"moe_intermediate_size": 40}, "experts' ffn = 40 is not a multiple of 32"),
        ({"intermediate_size": 100, "mlp_only_layers": [0]}, "ffn = 100 is not a multiple of 32"),
    ],
    ids=str,
)
def test_a_shape_that_kernels_cannot_run_is_one_clear_line(
    sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    odd = open_checkpoint(write_tiny("qwen3moe", tmp_path, **sizes))
    with pytest.raises(CheckpointError, match=f"{message}.* --backend torch"):
        load_packed(odd)


def test_a_width_that_no_layer_has_does_not_matter(tmp_path: Path) -> None:
    odd = open_checkpoint(write_tiny("qwen3moe", tmp_path / "model", intermediate_size=100))
    assert "up" not in load_packed(odd, folder=tmp_path / "cache").matrices


def test_norms_that_the_kernels_of_experts_lack_are_named(tmp_path: Path) -> None:
    config = open_checkpoint(write_variant("olmoe", tmp_path)).config
    assert unsupported_reason(config) is None
    reason = unsupported_reason(replace(config, post_norms=True))
    assert reason == "norms of what experts put out"
