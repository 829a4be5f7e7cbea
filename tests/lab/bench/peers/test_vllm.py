"""vLLM: its dtypes, and the folder that it is given."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.bench.peers import vllm
from midfill_lab.bench.peers.convert import W8A8, convert
from midfill_lab.bench.peers.results import LOADS
from midfill_lab.bench.peers.servers import ComparedModel, Launch, Room, launch_midfill
from midfill_lab.bench.peers.vllm import default_dtypes, launch_vllm

_KV_BYTES = "--kv-cache-memory-bytes"


def test_vllm_is_measured_in_bfloat16_and_int8_where_the_chip_multiplies_them() -> None:
    assert default_dtypes(["avx2", "avx512f"]) == ("float32",)
    for feature in ("avx512_bf16", "amx_bf16"):
        assert default_dtypes(["avx512f", feature]) == ("float32", "bfloat16", "w8a8")


def test_on_a_gpu_it_is_measured_in_bfloat16() -> None:
    assert default_dtypes(["avx2"], "cuda") == ("bfloat16",)


@pytest.mark.parametrize(("device", "visible"), [("cuda", None), ("cuda:1", "1")])
def test_on_a_gpu_it_gets_as_much_room_as_midfill_and_runs_as_it_is_by_default(
    device: str,
    visible: str | None,
    folder_model: ComparedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "find_interpreter", lambda *_, **__: ("python", "0.20.0"))
    room = Room(threads=1, sequence=128, sequences=4)
    on_cpu = launch_vllm(folder_model, room, None, "bfloat16")
    on_gpu = launch_vllm(folder_model, room, None, "bfloat16", device)
    own = launch_midfill(folder_model, room, speculation=False, kinds=LOADS, device=device)
    assert isinstance(on_cpu, Launch)
    assert isinstance(on_gpu, Launch)
    assert "--enforce-eager" not in on_gpu.command
    (kv_bytes,) = {_after("--kv-memory", own.command), _after(_KV_BYTES, on_gpu.command)}
    assert int(kv_bytes) == room.kv_tokens * folder_model.kv_values_per_token * 2
    assert on_gpu.environment.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize("compiler", ["g++", "clang++", ""])
def test_on_a_cpu_it_compiles_steps_where_there_is_a_compiler(
    compiler: str, folder_model: ComparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "find_interpreter", lambda *_, **__: ("python", "0.32.0"))
    monkeypatch.setattr(vllm.shutil, "which", lambda name: name if name == compiler else None)
    launch = launch_vllm(folder_model, Room(threads=1, sequence=128, sequences=4), None)
    assert isinstance(launch, Launch)
    assert ("--enforce-eager" in launch.command) == (not compiler)


def _after(flag: str, command: Sequence[str]) -> str:
    return command[command.index(flag) + 1]


def test_a_gguf_file_becomes_a_folder_with_the_same_weights_and_tokens(
    gguf_model: ComparedModel, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    assert gguf_model.gguf is not None
    convert(gguf_model.gguf, tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    assert folder.config.tied_embeddings
    for name in gguf_model.checkpoint.names():
        stored = gguf_model.checkpoint.tensor(name).to_float32()
        np.testing.assert_array_equal(folder.tensor(name).to_float32(), stored)
    text = "def caf\u00e9(x):\n    return [x, 2]\n<fim_prefix>"
    for parse in (False, True):
        assert folder.tokenizer.encode(text, parse_special=parse) == (
            gguf_model.checkpoint.tokenizer.encode(text, parse_special=parse)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


@pytest.mark.parametrize("source", ["gguf_model", "folder_model"])
def test_int8_weights_have_a_scale_per_output_and_the_others_are_bfloat16(
    source: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from safetensors.torch import load_file

    model: ComparedModel = request.getfixturevalue(source)
    convert(model.gguf or model.path, tmp_path / "plain", "bfloat16")
    convert(model.gguf or model.path, tmp_path / "int8", W8A8)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    int8 = load_file(tmp_path / "int8" / "model.safetensors")
    for name, weight in plain.items():
        if not name.endswith("_proj.weight"):
            assert int8[name].equal(weight)
            continue
        scale = int8[f"{name}_scale"]
        assert str(int8[name].dtype) == "torch.int8"
        assert scale.shape == (len(weight), 1)
        error = (int8[name] * scale - weight.float()).abs()
        assert (error <= 0.501 * scale).all()
    config = msgspec.json.decode((tmp_path / "int8" / "config.json").read_bytes())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_in_int8_a_token_reads_half_the_bytes_of_the_layers(
    folder_model: ComparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "find_interpreter", lambda *_, **__: ("python", "0.32.0"))
    monkeypatch.setattr(vllm, "_huggingface_folder", lambda *_: folder_model.path)
    room = Room(threads=1, sequence=128, sequences=4)
    plain, int8 = (launch_vllm(folder_model, room, None, dtype) for dtype in ("bfloat16", W8A8))
    assert isinstance(plain, Launch)
    assert isinstance(int8, Launch)
    config = folder_model.checkpoint.config
    head = 2 * config.vocab * config.hidden
    layers = plain.read_bytes("").weights - head
    assert int8.read_bytes("").weights == head + layers // 2
