"""Unmodified plugins against a server of the default model.

They are no part of this repository. Environment variables say where they are:
MIDFILL_LLAMA_VIM a clone of llama.vim, MIDFILL_TABBY_AGENT the folder of npm's package tabby-agent.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import wait_for
from running_server import RunningServer, start

from midfill.models.checkpoints.model_store import DEFAULT_MODEL

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TEXT = '''"""Shapes and their sizes."""


def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def perimeter(width, height):
    """Return the perimeter of a rectangle."""
{}

print(area(2, 3), perimeter(2, 3))
'''
HOLE = TEXT.splitlines().index("{}")  # where the caret's line is


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start(DEFAULT_MODEL, "--kv-memory", "512MB") as server:
        yield server


def plugin(variable: str, *programs: str) -> Path:
    """Return where a plugin is; skip the test if it, or a program that it needs, is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    if variable not in os.environ:
        pytest.skip(f"{variable} does not say where the plugin is")
    return Path(os.environ[variable])


class Terminal:
    """A program in a terminal of its own, in tmux."""

    def __init__(self, *command: str | Path) -> None:
        self._tmux = ("tmux", "-L", f"midfill-{os.getpid()}", "-f", "/dev/null")
        self._run("new-session", "-d", "-x", "160", "-y", "40", *map(str, command))

    def _run(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux, *words], capture_output=True, text=True, check=True
        ).stdout

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names, or type texts."""
        for key in keys:
            self._run("send-keys", key)

    def screen(self) -> str:
        """Return what the terminal shows."""
        return self._run("capture-pane", "-p")

    def shows(self, pattern: str) -> re.Match[str]:
        """Wait until the screen matches a pattern."""
        wait_for(lambda: re.search(pattern, self.screen()) is not None, 30)
        match = re.search(pattern, self.screen())
        assert match is not None
        return match

    def close(self) -> None:
        """End the terminal and what runs in it."""
        self._run("kill-server")


def test_llama_vim_shows_and_accepts_completions(server: RunningServer, tmp_path: Path) -> None:
    folder = plugin("MIDFILL_LLAMA_VIM", "vim", "tmux", "curl")
    settings, file = tmp_path / "vimrc", tmp_path / "area.py"
    settings.write_text(
        "set nocompatible noswapfile\n"
        f"let g:llama_config = {{'endpoint_fim': '{server.url}/infill'}}\n"
        f"set runtimepath^={folder}\n"
        "filetype plugin indent on\n"
    )
    file.write_text(TEXT.replace("{}\n", ""))
    terminal = Terminal("vim", "-u", settings, file)
    try:
        terminal.press("Enter")  # Vim 9.0 gets a warning that has to be read
        terminal.shows("Shapes and their sizes")
        terminal.press(f":{HOLE}", "Enter", "o", "ret")
        cost = r"\| c: (\d+).*\| p: (\d+)"
        hint = terminal.shows(rf"\n(    return \S.*\S) +{cost}").group(1)
        terminal.press("Tab", "Escape", ":w", "Enter")
        wait_for(lambda: f"\n{hint}\n" in file.read_text(), 10)
        terminal.press("o", "# and ")
        cached, computed = map(int, terminal.shows(cost).groups())
        assert cached > 60
        assert computed <= 8
    finally:
        terminal.close()


class Agent:
    """A language server on pipes, with as much of the protocol as a test needs."""

    def __init__(self, *command: str | Path, home: Path) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(home)},
        )
        self._calls = 0

    def notify(self, method: str, **params: object) -> None:
        """Send a notification."""
        self._send({"method": method, "params": params})

    def call(self, method: str, **params: object) -> Any:
        """Send a request; return its result."""
        self._calls += 1
        self._send({"id": self._calls, "method": method, "params": params})
        while (message := self._receive()).get("id") != self._calls or "method" in message:
            if "id" in message:  # a request of the agent's
                self._send({"id": message["id"], "result": None})
        return message["result"]

    def close(self) -> None:
        """End the agent."""
        self._process.kill()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while (line := self._process.stdout.readline()) != b"\r\n":
            assert line, "the agent ended"
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return json.loads(self._process.stdout.read(length))  # type: ignore[no-any-return]


def test_tabbys_agent_completes(server: RunningServer, tmp_path: Path) -> None:
    folder = plugin("MIDFILL_TABBY_AGENT", "node")
    settings = tmp_path / ".tabby-client" / "agent" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(
        f'[server]\nendpoint = "{server.url}"\n[anonymousUsageTracking]\ndisable = true\n'
    )
    agent = Agent("node", folder / "dist" / "cli.js", "--lsp", "--stdio", home=tmp_path)
    uri = (tmp_path / "area.py").as_uri()
    try:
        agent.call("initialize", processId=None, rootUri=tmp_path.as_uri(), capabilities={})
        agent.notify("initialized")
        text = TEXT.replace("{}", "    ret\n")
        document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        agent.notify("textDocument/didOpen", textDocument=document)
        (item,) = agent.call(
            "textDocument/completion",
            textDocument={"uri": uri},
            position={"line": HOLE, "character": 7},
        )["items"]
        assert item["textEdit"]["newText"] == "return width + height"
    finally:
        agent.close()
