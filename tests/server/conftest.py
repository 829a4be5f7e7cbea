"""Servers for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, start


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    """A server of the tiny model, for tests that leave it as it is."""
    with start(tiny_folder, "--kv-memory", "4MB", "--log-format", "json") as server:
        yield server
