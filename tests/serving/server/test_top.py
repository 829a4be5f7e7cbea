"""``midfill top`` in front of a real server, once and in a terminal of its own."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import default_interrupt, lasting_port
from running_server import RunningServer, start

PATIENCE = 60.0


def command(url: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "midfill", "top", "--url", url, "--interval", "0.2", *options]


def once(url: str, columns: int = 100) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(
        command(url, "--once"), env=environment, capture_output=True, text=True, check=False
    )


class Terminal:
    """A program in a terminal of its own; what it shows is kept without escape sequences."""

    def __init__(self, arguments: list[str], columns: int) -> None:
        self.own, other = pty.openpty()
        fcntl.ioctl(self.own, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            arguments,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(other)
        self.shown = ""

    def wait_for(self, pattern: str) -> str:
        """Wait until something is shown, from here on; return it."""
        self.shown, end = "", time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < end, self.shown
            ready, _, _ = select.select([self.own], [], [], 1)
            if ready:
                text = os.read(self.own, 65536).decode("utf-8", "ignore")
                self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        return found[0]

    def press(self, key: bytes) -> None:
        os.write(self.own, key)

    def ended(self) -> int:
        """Wait for the end, reading what is still shown; return the exit status."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < end
            with contextlib.suppress(OSError):  # it has closed its terminal
                if select.select([self.own], [], [], 0.1)[0]:
                    os.read(self.own, 65536)
        return self.process.returncode


def _take_terminal() -> None:
    """Make standard input the process's own terminal, whose Ctrl-C interrupts it."""
    default_interrupt()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(arguments: list[str], columns: int = 100) -> Iterator[Terminal]:
    opened = Terminal(arguments, columns)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.own)


def test_once_prints_the_servers_numbers(server: RunningServer) -> None:
    server.complete(prompt="a", max_tokens=2)
    server.wait_until_settled()
    result = once(server.url)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["midfill", "top", "tiny-llama", server.url]
    assert re.search(r"^requests +0 running, 0 queued \(0 tokens\), 0 in idle", result.stdout, re.M)
    slots = f"{server.metric('kv_slots'):,.0f}"
    assert re.search(rf"^KV .* 0% in use, \d+% cached, of {slots} tokens", result.stdout, re.M)
    assert re.search(r"^first token +- median, - 95%", result.stdout, re.M)
    answers = f"{server.metric('request_success_total'):,.0f}"
    assert re.search(rf"^since start +{answers} answers, ", result.stdout, re.M)
    assert "tenant" not in result.stdout  # there is one without a name


def test_nothing_is_cut_off_in_a_pipe(server: RunningServer) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    url = server.url + 100 * "/"
    arguments = command(url, "--once")
    shown = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    title, *_ = shown.stdout.splitlines()
    assert title.endswith(url)


@pytest.mark.parametrize("columns", [20, 45, 200])
def test_it_fits_any_width(server: RunningServer, columns: int) -> None:
    result = once(server.url, columns)
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= columns


@pytest.mark.parametrize("options", [["--once"], []])
def test_without_a_server_it_says_so_and_fails(options: list[str]) -> None:
    with terminal(command("127.0.0.1:1", *options)) as shown:
        shown.wait_for("midfill: no server answers at http://127.0.0.1:1")
        assert shown.ended() == 1


def test_keys_end_it(server: RunningServer) -> None:
    for key in (b"q", b"\x03"):
        with terminal(command(server.url), columns=60) as shown:
            shown.wait_for("since start")
            shown.press(key)
            assert shown.ended() == 0


@pytest.mark.slow
def test_it_lives_longer_than_its_server(tiny_folder: Path) -> None:
    """Its tenants are shown beside each other, and a new server is shown as a new one."""
    options = ["--kv-memory", "4MB", "--api-key", "one", "--api-key", "two"]
    options += ["--port", str(lasting_port())]
    with (
        start(tiny_folder, *options) as server,
        terminal([*command(server.url), "--api-key", "one"]) as shown,
    ):
        body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
        headers = {"authorization": "Bearer two"}
        server.post("/v1/completions", body, headers=headers)
        shown.wait_for(r"since start +1 answers, 5 tokens generated")
        shown.wait_for(r"key-1 +0 +0 [\s\S]*key-2 +0 +0 ")
        server.process.send_signal(signal.SIGTERM)
        shown.wait_for("doesn't answer")
        server.process.wait(60)
        with start(tiny_folder, *options):
            shown.wait_for(r"since start +0 answers")
            shown.press(b"q")
            assert shown.ended() == 0
