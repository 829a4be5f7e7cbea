"""Requests with curl that the documentation shows, and the answers that it shows for them."""

import itertools
import shutil
import subprocess
from typing import Any

import pytest
from doc_blocks import PAGES, ROOT, Block, ShellCommand, all_blocks, blocks_of, shell_commands
from running_server import RunningServer

ADDRESS = "http://127.0.0.1:8080"
REQUESTS = [
    command
    for block in all_blocks("sh")
    for command in shell_commands(block)
    if command.program == "curl"
]
VOLATILE = {"id", "created", "document", "cached_tokens", "computed_tokens"}
"""Fields that depend on the time and on earlier requests."""


def ask(server: RunningServer, command: ShellCommand) -> str:
    """Run a documented curl against a server; return what it prints."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    words = [word.replace(ADDRESS, server.url) for word in command.words[1:]]
    assert any(server.url in word for word in words), command
    run = ["curl", "--silent", "--show-error", "--fail-with-body", *words]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def shown_answers() -> list[tuple[ShellCommand, Block]]:
    """Each curl with the block of JSON right after it."""
    found = []
    for page in PAGES:
        path = page.relative_to(ROOT).as_posix()
        for before, after in itertools.pairwise(blocks_of(page.read_text("utf-8"), path)):
            commands = shell_commands(before) if before.language == "sh" else []
            if after.language == "json" and commands and commands[-1].program == "curl":
                found.append((commands[-1], after))
    return found


def without_volatile(value: Any) -> Any:
    """An answer without what differs from run to run; the fields' names stay."""
    if isinstance(value, dict):
        return {
            key: None if key in VOLATILE else without_volatile(inner)
            for key, inner in value.items()
        }
    return [without_volatile(inner) for inner in value] if isinstance(value, list) else value
