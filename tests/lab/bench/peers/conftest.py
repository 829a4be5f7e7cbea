"""Models to compare servers on, and programs that stand in for servers."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stand_in import Program, write_program
from tiny_checkpoints import write_tiny
from tiny_gguf import write_gguf

if TYPE_CHECKING:
    from midfill_lab.bench.peers.servers import ComparedModel


@pytest.fixture(scope="session")
def folder_model(tmp_path_factory: pytest.TempPathFactory) -> "ComparedModel":
    """A tiny model as a Hugging Face folder."""
    from midfill_lab.bench.peers.servers import open_compared

    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    return open_compared(str(write_tiny("llama", folder, max_position_embeddings=8192)), None)


@pytest.fixture(scope="session")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> "ComparedModel":
    """A tiny model as a GGUF file."""
    from midfill_lab.bench.peers.servers import open_compared

    return open_compared(str(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")), None)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Makes a program that stands in for llama-server."""
    return lambda source: write_program(tmp_path / "llama-server", source)
