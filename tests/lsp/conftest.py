"""One server and one language server for the tests of this folder."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from lsp_editor import Editor, connected
from running_server import RunningServer, start


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    """A server of the tiny model, for tests that leave it as it is."""
    # Answers take as long as a larger model's, so that tests can act amid them.
    with start(tiny_folder, "--kv-memory", "4MB", step_seconds=0.01) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def editor(server: RunningServer) -> AsyncIterator[Editor]:
    """An editor with ``midfill lsp`` and that server, for tests that use documents of their own."""
    settings: dict[str, object] = {
        "url": server.url,
        "maxTokens": 8,
        "debounceMs": 0,
        "minConfidence": 0,
    }
    async with connected(settings=settings) as editor:
        yield editor
