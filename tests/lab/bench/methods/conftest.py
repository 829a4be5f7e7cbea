"""A tiny model with room for long prompts, loaded once for the folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny_checkpoints import write_tiny

if TYPE_CHECKING:
    from midfill_lab.bench.methods.session import MethodSession


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny") / "long"
    return str(write_tiny("llama", folder, max_position_embeddings=4096))


@pytest.fixture(scope="session")
def session(tiny_model: str) -> Iterator["MethodSession"]:
    from midfill_lab.bench.methods.session import MethodSession

    one = MethodSession(tiny_model, threads=1)
    yield one
    one.close()
