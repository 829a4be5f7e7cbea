"""How a server of OpenVINO GenAI is started, and what is said where it can't be."""

import sys
from pathlib import Path

import pytest

from midfill_lab.bench.peers import openvino
from midfill_lab.bench.peers.openvino import launch_openvino
from midfill_lab.bench.peers.servers import PORT, ComparedModel, Launch, Missing, Room

ROOM = Room(threads=2, sequence=6144, sequences=16)


def test_folders_and_interpreters_without_it_are_left_out_with_a_reason(
    gguf_model: ComparedModel, folder_model: ComparedModel
) -> None:
    assert isinstance(found := launch_openvino(folder_model, ROOM, None), Missing)
    assert found.reason == f"is measured on GGUF files, and {folder_model.name} is none"
    found = launch_openvino(gguf_model, ROOM, Path(sys.executable))
    assert isinstance(found, Missing)
    assert "does not have it; install it with python -m venv openvino" in found.reason


def test_it_gets_the_same_room_and_computes_prompts_in_one_step(
    gguf_model: ComparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "find_interpreter", lambda *_: ("python", "1.0"))
    launch = launch_openvino(gguf_model, ROOM, None)
    assert isinstance(launch, Launch)
    _, _, _, model, port, threads, gigabytes, tokens, sequences = launch.command
    assert (model, port) == (str(gguf_model.path.resolve()), PORT)
    assert (threads, gigabytes, tokens, sequences) == ("2", "1", "6144", "16")
