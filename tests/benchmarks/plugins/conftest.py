"""A model whose prompts are counted."""

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("plugins") / "tiny"
    return open_checkpoint(write_tiny("llama", folder, max_position_embeddings=8192))
