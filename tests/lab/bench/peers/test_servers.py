"""How midfill's own server is described: what it reads per token, and in which precision."""

import dataclasses
from pathlib import Path

from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions
from midfill.runners.loading import choose_slots, choose_states, max_running
from midfill_lab.bench.peers.results import LOADS
from midfill_lab.bench.peers.servers import (
    ComparedModel,
    Launch,
    Room,
    launch_midfill,
    open_compared,
)

BANNER = "weights 100.0 MB"
SPARE = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def launched(model: ComparedModel) -> Launch:
    return launch_midfill(model, Room(1, 128, 1), speculation=False, kinds=LOADS)


def test_a_dense_model_reads_what_it_is_packed_into(gguf_model: ComparedModel) -> None:
    launch = launched(gguf_model)
    assert launch.read_bytes(BANNER).weights == 100 * 2**20
    assert launch.read_bytes("").weights == gguf_model.stored_bytes_read
    assert "KV float32" in launch.precision


def test_of_a_mixture_a_token_reads_its_experts_alone(tmp_path: Path) -> None:
    model = open_compared(str(write_tiny("qwen3moe", tmp_path / "mixture")), SPARE)
    experts = model.checkpoint.config.experts
    assert experts is not None
    assert experts.per_token < experts.count
    tensors = map(model.checkpoint.tensor, model.checkpoint.names())
    read = launched(model).read_bytes(BANNER).weights
    assert read == model.stored_bytes_read < sum(tensor.data.nbytes for tensor in tensors)


def test_an_embedding_that_is_only_looked_up_is_not_read(tmp_path: Path) -> None:
    untied = open_compared(str(write_tiny("llama", tmp_path / "untied")), SPARE)
    looked_up = untied.checkpoint.tensor("embed.weight").data.nbytes
    tensors = map(untied.checkpoint.tensor, untied.checkpoint.names())
    stored = sum(tensor.data.nbytes for tensor in tensors)
    assert launched(untied).read_bytes(BANNER).weights == stored - looked_up


def test_a_mixtures_routers_are_floats_whatever_its_experts_are(
    tmp_path: Path, gguf_model: ComparedModel
) -> None:
    floats = open_compared(str(write_tiny("qwen3moe", tmp_path / "mixture")), SPARE)
    assert "float32" in launched(floats).precision
    mixed = dataclasses.replace(gguf_model)
    mixed.__dict__["layer_kinds"] = ("f32", "q4_0")
    assert "as stored" in launched(mixed).precision


def test_a_hybrid_has_room_for_a_state_per_sequence_beside_its_kv(tmp_path: Path) -> None:
    model = open_compared(str(write_tiny("granitehybrid", tmp_path / "hybrid")), SPARE)
    config, room = model.checkpoint.config, Room(1, 128, 16)
    launch = launch_midfill(model, room, speculation=False, kinds=LOADS)
    options = ModelOptions(kv_memory=int(launch.command[launch.command.index("--kv-memory") + 1]))
    states = choose_states(config, options, 0)
    assert max_running(options, states) >= room.sequences
    slot_bytes = model.kv_values_per_token * 4
    assert choose_slots(config, options, 0, slot_bytes, states) >= room.kv_tokens
