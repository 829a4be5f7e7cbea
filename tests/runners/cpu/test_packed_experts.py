"""Packed experts: in memory once, in the order of their panels, and of shapes that kernels run."""

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import CheckpointError
from midfill.kernels.cpu.weight_formats import PANEL
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.packed_model import PackedModel, load_packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("packed")
    checkpoint = open_checkpoint(write_variant("qwen3moe-dense-layers", folder / "model"))
    return load_packed(checkpoint, "q8", folder=folder / "cache")


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
