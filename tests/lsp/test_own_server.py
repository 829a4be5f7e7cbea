"""A server of the language server's own: started when it is needed, ended with it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lsp_editor import Editor, connected, frame, insertion
from lsprotocol import types
from processes import is_running, wait_for

pytestmark = pytest.mark.slow

TEXT = "x = 1 + "


async def first_completions(editor: Editor, uri: str) -> list[types.InlineCompletionItem]:
    """Ask until there are completions; while the model loads, there are none at once."""
    for number in range(2000):
        editor.change(uri, insertion(1, 0, str(number % 10)))
        items = await editor.ask(uri, 0, 8)
        if items:
            return items
        assert editor.messages == []
        await asyncio.sleep(0.1)
    raise AssertionError("no completions")


def children(process_id: int) -> list[int]:
    """Return the ids of a process's children."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    return [
        int(pid) for pid, parent, state in rows if int(parent) == process_id and "Z" not in state
    ]


@pytest.mark.asyncio
async def test_the_model_that_is_named_is_served_until_the_language_server_ends(
    tiny_folder: Path,
) -> None:
    own = ("--model", str(tiny_folder), "-n", "8", "--min-confidence", "0")
    async with connected(*own, progress=True) as editor:
        uri = editor.open(TEXT + "\n")
        before = await first_completions(editor, uri)
        (server,) = children(editor.process_id)
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: not is_running(server))
        # It is started again.
        after = await first_completions(editor, uri)
        assert before[0].insert_text != ""
        assert after[0].insert_text != ""
        (server,) = children(editor.process_id)
        engines = children(server)
        assert engines
    wait_for(lambda: not any(map(is_running, [server, *engines])))


@pytest.mark.asyncio
async def test_the_user_sees_what_a_load_waits_for(tiny_folder: Path) -> None:
    async with connected("--model", str(tiny_folder), progress=True) as editor:
        await first_completions(editor, editor.open(TEXT + "\n"))
        ((begin, *reports, end),) = editor.client.progress_reports.values()
        assert isinstance(begin, types.WorkDoneProgressBegin)
        assert begin.title == f"midfill: loading {tiny_folder}"
        messages = [getattr(report, "message", None) for report in reports]
        assert "loading libraries" in messages
        assert isinstance(end, types.WorkDoneProgressEnd)


@pytest.mark.real_model
@pytest.mark.asyncio
async def test_the_default_model_is_served_where_no_server_answers() -> None:
    options = ("--url", "http://127.0.0.1:9", "--start", "--min-confidence", "0")
    async with connected(*options, progress=True) as editor:
        assert await first_completions(editor, editor.open(TEXT + "\n"))


@pytest.mark.asyncio
async def test_a_model_that_cant_be_served_is_told_once(tmp_path: Path) -> None:
    async with connected("--model", str(tmp_path), progress=True) as editor:
        await editor.message_count(1)
        uri = editor.open(TEXT)
        assert await editor.ask(uri, 0, 8) == []
        (message,) = editor.messages
        assert message.startswith(f"midfill: midfill serve {tmp_path}: ")


def test_a_language_server_that_is_killed_takes_its_server_along(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "midfill", "lsp", "--model", str(tiny_folder)]
    hello = [
        {"id": 1, "method": "initialize", "params": {"processId": None, "capabilities": {}}},
        {"method": "initialized", "params": {}},
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        for message in hello:
            process.stdin.write(frame({"jsonrpc": "2.0", **message}))
        process.stdin.flush()
        wait_for(lambda: any(children(each) for each in children(process.pid)), 60)
        (server,) = children(process.pid)
        process.kill()
    wait_for(lambda: not is_running(server))
