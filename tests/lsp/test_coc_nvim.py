"""Completions in Vim, by coc.nvim: ghost text, Tab, and what the server has cached.

MIDFILL_COC_NVIM names a folder of coc.nvim with its build/index.js (npm ci, npx rolldown -c).
Tried with commit 8739a6720 in Vim 9.0.1378.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import wait_for
from running_server import RunningServer, start

from midfill.models.checkpoints.model_store import DEFAULT_MODEL

COC = os.environ.get("MIDFILL_COC_NVIM")
MISSING = [program for program in ("vim", "tmux", "node") if shutil.which(program) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.skipif(COC is None, reason="MIDFILL_COC_NVIM names no folder of coc.nvim"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

VIMRC = """
set nocompatible noswapfile nobackup hidden signcolumn=no
let g:coc_config_home = '{home}'
let g:coc_data_home = '{home}/data'
set rtp^={coc}
inoremap <silent><expr> <Tab> coc#inline#visible() ? coc#inline#accept() : "\\<Tab>"
"""
TEXT = '''def mean(values: list[float]) -> float:
    """Return the mean of some values."""


print(mean([1.0, 2.0]))
'''


class Vim:
    """Vim in a terminal of its own, with coc.nvim and ``midfill lsp``.

    Args:
        folder: for its files.
        text: of the file that it has open.
        url: of the midfill server.
    """

    def __init__(self, folder: Path, text: str, url: str) -> None:
        self._name, self._folder = f"midfill-{uuid.uuid4().hex}", folder
        command = {"command": sys.executable, "args": ["-m", "midfill", "lsp", "--url", url]}
        settings = {"languageserver": {"midfill": {**command, "filetypes": ["*"]}}}
        (folder / "coc-settings.json").write_text(json.dumps(settings))
        (folder / "vimrc").write_text(VIMRC.format(home=folder, coc=COC))
        (folder / "text.py").write_text(text)
        vim = "vim", "-u", str(folder / "vimrc"), str(folder / "text.py")
        self._tmux("new-session", "-d", "-x", "100", "-y", "20", *vim)

    def type(self, text: str) -> None:
        """Type characters."""
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names."""
        self._tmux("send-keys", *keys)

    def screen(self) -> str:
        """Return what is seen."""
        return self._tmux("capture-pane", "-p")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; None if it has none."""
        file = self._folder / f"{uuid.uuid4().hex}.json"
        self.press("Escape")
        time.sleep(0.1)  # or else the terminal takes it for the Alt key
        self.type(f":silent! call writefile([json_encode({expression})], '{file}')\r")
        for _ in range(200):
            time.sleep(0.1)
            if file.exists() and (text := file.read_text()):
                return json.loads(text)
        return None

    def counts(self) -> dict[str, int]:
        """Return the language server's statistics."""
        counts: dict[str, int] = self.evaluate(
            "CocRequest('midfill', 'workspace/executeCommand', {'command': 'midfill.statistics'})"
        )
        return counts

    def close(self) -> None:
        """End it."""
        self._tmux("kill-server")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._name, "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server of the default model."""
    with start(DEFAULT_MODEL) as server:
        yield server


@pytest.fixture
def vim(server: RunningServer, tmp_path: Path) -> Iterator[Vim]:
    """Vim once the language server runs."""
    with contextlib.closing(Vim(tmp_path, TEXT, server.url)) as vim:
        state = "CocAction('services')[0].state"
        wait_for(lambda: vim.evaluate(state) == "running", 120)
        yield vim


def test_ghost_text_is_shown_and_accepted_with_tab(vim: Vim, server: RunningServer) -> None:
    vim.type("3GA    ret")
    wait_for(lambda: "    return sum(values) / len(values)" in vim.screen())
    assert vim.evaluate("getline(3)") == "    ret"  # the rest is ghost text
    vim.type("Au")
    wait_for(lambda: "    return sum(values) / len(values)" in vim.screen())
    vim.press("Tab")
    wait_for(lambda: vim.evaluate("getline(3)") == "    return sum(values) / len(values)")
    counts = vim.counts()
    assert counts["accepted"] == 1
    assert counts["acceptedCharacters"] == len("rn sum(values) / len(values)")


def test_later_keystrokes_find_their_prompt_in_the_cache(vim: Vim, server: RunningServer) -> None:
    vim.type("3GA    total")
    for key in "qzj7":  # one by one: leaving insert mode makes coc.nvim cancel what it asked for
        answered = server.metric("prompt_tokens_total")
        vim.type(key)
        wait_for(lambda before=answered: server.metric("prompt_tokens_total") > before)
    counts = vim.counts()
    assert counts["requests"] >= 4
    assert counts["lastPromptTokens"] - counts["lastCachedTokens"] <= 8
