"""A real server: ``midfill serve`` in a process of its own, on a free port."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai


@dataclass
class RunningServer:
    """A server that has said it is ready."""

    url: str
    process: "subprocess.Popen[str]"
    banner: str
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """The official client, which doesn't try again on its own."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        """Send JSON, or whatever the options say."""
        if body is not None:
            options["json"] = body
        return self.client.post(self.url + path, **options)  # type: ignore[arg-type]

    def get(self, path: str) -> httpx.Response:
        """Ask for a path."""
        return self.client.get(self.url + path)

    def complete(self, **body: object) -> dict:  # type: ignore[type-arg]
        """A completion that must succeed."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def metric(self, name: str) -> float:
        """One of the server's metrics, summed over its labels."""
        text = self.get("/metrics").text
        values = re.findall(rf"^midfill:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.01)

    def engine_process(self) -> int:
        """The engine process's id."""
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
        )
        rows = [line.split() for line in listing.stdout.splitlines()]
        (child,) = (
            int(pid)
            for pid, parent, state in rows
            if int(parent) == self.process.pid and not state.startswith("Z")
        )
        return child


@contextlib.contextmanager
def start(model: Path | str, *options: str) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "midfill", "serve", str(model), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--threads", "1"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        banner = ""
        while "curl" not in banner:
            line = process.stdout.readline()
            assert line, f"the server ended: {process.wait()}"
            banner += line
        match = re.search(r"http://\S+", banner)
        assert match is not None
        yield RunningServer(match.group(), process, banner)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
