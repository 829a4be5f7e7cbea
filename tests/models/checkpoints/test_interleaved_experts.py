"""gpt-oss's experts in safetensors files: unquantised or in MXFP4, and what can be wrong."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mxfp4_checkpoints import open_all
from packed_steps import Sequence, Stepper
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import CheckpointError
from midfill.kernels.cpu.weight_formats import WeightFormat
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.huggingface import HuggingFaceCheckpoint
from midfill.models.checkpoints.interleaved_experts import ExpertEntry, split_interleaved
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.checkpoints.safetensors_file import SafetensorsEntry
from midfill.models.config import tensor_shapes
from midfill.runners.cpu.runner import CpuRunner
from serving import torch_runner

Tensors = dict[str, np.ndarray]
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("gpt-oss", tmp_path_factory.mktemp("gpt-oss") / "tiny")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """All of them with the clamps of released models, which GGUF doesn't state."""
    folder = tmp_path_factory.mktemp("mxfp4")
    return open_all(write_tiny("gpt-oss", folder / "tiny", swiglu_limit=7.0), folder)


def test_all_tensors_are_named_and_shaped_as_configured(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    expected = tensor_shapes(checkpoint.config)
    assert {name: checkpoint.tensor(name).shape for name in checkpoint.names()} == expected
    for name, shape in expected.items():
        assert checkpoint.tensor(name).to_float32().shape == shape


def test_outputs_of_gate_and_up_are_stored_in_turn_and_transposed(tiny: Path) -> None:
    checkpoint, stored = open_checkpoint(tiny), load_file(tiny / "model.safetensors")
    for part, first in (("gate", 0), ("up", 1)):
        weight = checkpoint.tensor(f"layers.1.experts.4.{part}.weight").to_float32()
        np.testing.assert_array_equal(weight, stored[GATE_UP][4, :, first::2].T)
        bias = checkpoint.tensor(f"layers.1.experts.4.{part}.bias").to_float32()
        np.testing.assert_array_equal(bias, stored[f"{GATE_UP}_bias"][4, first::2])
    down = checkpoint.tensor("layers.1.experts.4.down.weight").to_float32()
    theirs = stored["model.layers.1.mlp.experts.down_proj"]
    np.testing.assert_array_equal(down, theirs[4].T)


@pytest.mark.parametrize("stored", ["folder", "gguf"])
def test_mxfp4_is_read_exactly(models: dict[str, Checkpoint], stored: str) -> None:
    exact, quantised = models["exact"], models[stored]
    assert sorted(quantised.names()) == sorted(exact.names())
    for name in exact.names():
        tensor = quantised.tensor(name)
        is_matrix = ".experts." in name and name.endswith("weight")
        assert tensor.kind == ("mxfp4" if is_matrix else "f32")
        np.testing.assert_array_equal(tensor.to_float32(), exact.tensor(name).to_float32())


def test_matrices_are_views_of_the_file(models: dict[str, Checkpoint]) -> None:
    for name in ("gate", "down"):
        tensor = models["folder"].tensor(f"layers.0.experts.2.{name}.weight")
        assert tensor.data.base is not None
        assert tensor.exponents is not None
        assert tensor.exponents.base is not None


def logits(checkpoint: Checkpoint) -> tuple[np.ndarray, set[int]]:
    """Logits of a prompt on the CPU kernels, and the formats of the experts."""
    runner = CpuRunner.load(checkpoint, slots=64, threads=2, kv_cache_dtype="f32")
    found = Stepper(runner).prefill(Sequence(list(range(10, 60))), chunk_sizes=[7, 1])
    experts = runner.model.experts
    assert experts is not None
    formats = experts.gate_up.formats | experts.down.formats
    runner.close()
    return found, {int(each) for each in formats}


def test_the_kernels_compute_with_mxfp4_as_it_is(models: dict[str, Checkpoint]) -> None:
    results = {name: logits(model) for name, model in models.items()}
    assert results["folder"][1] == results["gguf"][1] == {WeightFormat.MXFP4}
    np.testing.assert_array_equal(results["folder"][0], results["gguf"][0])
    expected = Stepper(torch_runner(models["gguf"], slots=64)).prefill(
        Sequence(list(range(10, 60)))
    )
    np.testing.assert_allclose(results["exact"][0], expected, atol=1e-4)
    # Activations are rounded to int8, which sends a few rows to another expert.
    errors = np.linalg.norm(results["gguf"][0] - expected, axis=1)
    assert np.median(errors / np.linalg.norm(expected, axis=1)) < 0.03


def changed(
    models: dict[str, Checkpoint], change: Callable[[Tensors], object], folder: Path
) -> Path:
    """Return a copy of the folder in MXFP4 with other tensors."""
    source = models["folder"].path
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(
        {n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(f"{GATE_UP}_scales"),
            r"tensor '.*gate_up_proj_scales' is missing",
        ),
        (
            lambda tensors: tensors.pop(f"{GATE_UP}_blocks"),
            r"tensor 'model\.layers\.1\.mlp\.experts\.0\.(gate|up)_proj\.weight' is missing",
        ),
        (
            lambda tensors: tensors.update(
                {f"{GATE_UP}_scales": tensors[f"{GATE_UP}_scales"][:, :-2]}
            ),
            r"gate_up_proj_blocks' of shape .* aren't MXFP4's blocks and their scales",
        ),
        (
            lambda tensors: tensors.update(
                {
                    f"{GATE_UP}_{part}": tensors[f"{GATE_UP}_{part}"][:, :-2]
                    for part in ("blocks", "scales")
                }
            ),
            r"'.*experts\.0\.(gate|up)_proj\.weight' has shape \[95, 64\], .* asks for \[96, 64\]",
        ),
        (
            lambda tensors: tensors.update({f"{GATE_UP}_bias": tensors[f"{GATE_UP}_bias"][0]}),
            r"gate_up_proj_bias' of shape \[192\] isn't that of all experts",
        ),
        (
            lambda tensors: tensors.update(
                {f"{GATE_UP}_scales": tensors[f"{GATE_UP}_scales"].astype(np.float32)}
            ),
            r"gate_up_proj_blocks' and '.*gate_up_proj_scales' must be U8",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": np.zeros(64, np.uint8)}),
            r"tensor 'model\.norm\.weight' has type U8, which midfill reads of experts only",
        ),
        (
            lambda tensors: tensors.pop("model.layers.2.self_attn.sinks"),
            r"tensor 'model\.layers\.2\.self_attn\.sinks' is missing",
        ),
    ],
    ids=[
        "no scales", "no blocks", "fewer scales", "fewer outputs", "one bias", "scales of floats",
        "bytes elsewhere", "no sinks",
    ],
)  # fmt: skip
def test_a_broken_folder_is_one_line_that_says_what_is_wrong(
    models: dict[str, Checkpoint],
    change: Callable[[Tensors], object],
    message: str,
    tmp_path: Path,
) -> None:
    folder = changed(models, change, tmp_path / "broken")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_family_without_such_experts_reads_no_bytes(tiny: Path, tmp_path: Path) -> None:
    folder = write_variant("qwen3moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(64, np.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has type U8; midfill reads F32, F16, BF16"):
        HuggingFaceCheckpoint(folder)


def test_parts_are_split_without_reading_any() -> None:
    stacked = SafetensorsEntry(Path("file"), "bf16", (2, 64, 96), 0, 2 * 64 * 96 * 2)
    other = SafetensorsEntry(Path("file"), "f32", (64,), 0, 256)
    split = split_interleaved({"mlp.experts.gate_up_proj": stacked, "norm.weight": other})
    names = [f"mlp.experts.{e}.{part}_proj.weight" for e in (0, 1) for part in ("gate", "up")]
    assert list(split) == [*names, "norm.weight"]
    assert split["norm.weight"] is other
    assert split[names[3]] == ExpertEntry(stacked, None, 1, 1, 2, (48, 64))
