"""Packed streams of hidden rows: in memory once, KV for the layers that keep it, known shapes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import CheckpointError, OptionError
from midfill.kernels.cpu.altup import data
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models import altup
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.runner import choose_kv_cache_dtype, slot_bytes


def test_kernels_and_configurations_mean_as_many_streams() -> None:
    assert data.STREAMS == altup.STREAMS


def test_each_weight_is_in_memory_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("gemma3n", tmp_path / "model"))
    packed = load_packed(checkpoint, "q8", folder=tmp_path / "cache")
    in_memory = {id(m.packed): m.packed.nbytes for m in packed.matrices.values()}
    stored = {id(m.packed): 0 for m in packed.matrices.values()}
    for name, matrix in packed.matrices.items():
        stored[id(matrix.packed)] += 0 if name == "head" else matrix.stored_bytes
    assert in_memory == stored
    assert packed.config.layers == 3
    # Queries alone of two layers, beside queries, keys and values of the other three.
    assert len(packed.matrices["query"].panels) == 2 * (4 * 32) // 32
    assert len(packed.matrices["qkv"].panels) == 3 * (8 * 32) // 32


def test_what_was_packed_is_read_again(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("gemma3n", tmp_path / "model"))
    first, second = (load_packed(checkpoint, "q8", folder=tmp_path / "cache") for _ in range(2))
    assert first.altup is not None
    assert second.altup is not None
    assert first.altup.sizes == second.altup.sizes
    np.testing.assert_array_equal(first.altup.router, second.altup.router)
    np.testing.assert_array_equal(first.altup.query.panels, second.altup.query.panels)


def test_a_token_has_kv_in_the_layers_that_keep_it(tmp_path: Path) -> None:
    config = open_checkpoint(write_variant("gemma3n", tmp_path)).config
    assert slot_bytes(config, KVCacheDtype.F16) == 3 * 2 * 32 * 2 * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"laurel_rank": 24}, "laurel_rank = 24 is not a multiple of 32"),
        ({"hidden_size_per_layer_input": 16}, "layer_width = 16 is not a multiple of 32"),
    ],
    ids=["rank", "width"],
)
def test_a_shape_that_kernels_cannot_run_is_one_clear_line(
    sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    odd = open_checkpoint(write_tiny("gemma3n", tmp_path, **sizes))
    with pytest.raises(CheckpointError, match=f"{message}.* --backend torch"):
        load_packed(odd)


@pytest.mark.parametrize("name", ["i8", "i4"])
def test_kv_of_few_bits_is_refused(name: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("gemma3n", tmp_path))
    with pytest.raises(OptionError, match=f"--kv-cache-dtype {name} .* give f16") as caught:
        choose_kv_cache_dtype(checkpoint, "auto", name)
    assert "\n" not in str(caught.value)
