"""Servers for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, start


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    """A server of the tiny model, for tests that leave it as it is."""
    names = ("snapkv", "cacheblend", "epicache")
    allowed = [part for name in names for part in ("--allow-method", name)]
    # The tiny model's answers are worth nothing; editors get them nevertheless.
    options = ("--kv-memory", "4MB", "--log-format", "json", "--min-confidence", "0")
    with start(tiny_folder, *options, *allowed) as server:
        yield server


@pytest.fixture(scope="session")
def slow_server(tiny_folder: Path) -> Iterator[RunningServer]:
    """The same with steps as slow as a larger model's, for tests that act amid an answer."""
    with start(
        tiny_folder, "--kv-memory", "4MB", "--min-confidence", "0", step_seconds=0.01
    ) as server:
        yield server
