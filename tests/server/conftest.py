"""Servers for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, start


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    """A server of the tiny model, for tests that leave it as it is."""
    options = ("--kv-memory", "4MB", "--log-format", "json", "--allow-method", "snapkv")
    with start(tiny_folder, *options) as server:
        yield server
