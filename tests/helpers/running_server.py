"""A real server: ``midfill serve`` in a process of its own, on a free port."""

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
from processes import default_interrupt, wait_for
from slowed_engines import slowed


@dataclass
class RunningServer:
    """A server that has reported ready."""

    url: str
    process: "subprocess.Popen[str]"
    banner: str
    client: httpx.Client
    log_path: Path
    api_key: str | None = None  # one that reads metrics, if the server has keys

    @property
    def log(self) -> list[str]:
        """What the server has logged so far, line by line; the last may be on its way."""
        return self.log_path.read_text("utf-8").rpartition("\n")[0].splitlines()

    def logged(self, request_id: str) -> dict[str, Any]:
        """What a server that logs JSON has logged of a finished request."""

        def found() -> list[dict[str, Any]]:
            lines = [json.loads(line) for line in self.log]
            return [
                line
                for line in lines
                if line.get("request_id") == request_id and line["logger"] == "midfill.access"
            ]

        wait_for(lambda: bool(found()))  # the line may come after the answer
        (line,) = found()
        return line

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """The official client, without its automatic retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        """POST JSON, or whatever the options say."""
        if body is not None:
            options["json"] = body
        return self.client.post(self.url + path, **options)  # type: ignore[arg-type]

    def get(self, path: str) -> httpx.Response:
        """GET a path, with the API key if there is one."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return self.client.get(self.url + path, headers=headers)

    def complete(self, **body: object) -> dict:  # type: ignore[type-arg]
        """Return the response of a completion that must succeed."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def metric(self, name: str) -> float:
        """Return one of the server's metrics, summed over its labels."""
        text = self.get("/metrics").text
        values = re.findall(rf"^midfill:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def is_idle(self) -> bool:
        """Whether the engine has no request, running or waiting."""
        requests = re.findall(
            r"^midfill:num_requests_(?:running|waiting)(?:{[^}]*})? (\S+)$",
            self.get("/metrics").text,  # once: requests go from one number to the other
            re.MULTILINE,
        )
        assert requests, "no metrics of requests"
        return not any(map(float, requests))

    def wait_until_settled(self) -> None:
        """Wait until nothing is computed in idle time any more that earlier answers have caused.

        What follows an answer is prepared on the thread that encodes prompts, and then submitted;
        both take what they get in order.
        """
        self.complete(prompt="settle", max_tokens=1)
        self.wait_for(lambda: self.metric("num_requests_background") == 0)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until a condition holds; fail if it does not within ``seconds``."""
        wait_for(condition, seconds)

    def engine_process(self) -> int:
        """Return the id of the engine process."""
        (engine,) = self.engine_processes()
        return engine

    def engine_processes(self) -> list[int]:
        """Return the ids of the engine processes in the order in which they were started."""
        # -ww: ps cuts commands at $COLUMNS otherwise, and some environments set it.
        listing = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [line.split(maxsplit=3) for line in listing.stdout.splitlines()]
        return sorted(
            int(pid)
            for pid, parent, state, *command in rows
            if int(parent) == self.process.pid
            and not state.startswith("Z")
            and "midfill.engine.process.main" in "".join(command)
        )


@contextlib.contextmanager
def start(
    model: Path | str,
    *options: str,
    signals: Callable[[], None] = default_interrupt,
    python: Path | str = sys.executable,
    verify: ssl.SSLContext | bool = True,
    step_seconds: float = 0.0,
) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, and end it with the block.

    Args:
        model: what to serve.
        options: further options of ``midfill serve``.
        signals: sets the process's signal handling before it starts.
        python: the interpreter; one of another environment has its own midfill.
        verify: how the client checks the server's certificate.
        step_seconds: minimum time that each step of its engines takes, for tests that act amid
            an answer: the tiny model's own steps take less than a millisecond.
    """
    command = [python, "-m", "midfill", "serve", str(model), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    environment = slowed(environment, step_seconds)
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        subprocess.Popen(
            [*command, "--threads", "1"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            preexec_fn=signals,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            banner = ""
            while "curl" not in banner:
                line = process.stdout.readline()
                assert line, f"the server ended: {process.wait()}"
                banner += line
            match = re.search(r"https?://\S+", banner)
            assert match is not None
            keys = [key for option, key in pairwise(options) if option == "--api-key"]
            with httpx.Client(timeout=120, verify=verify) as client:
                yield RunningServer(
                    match.group(), process, banner, client, Path(log.name), *keys[:1]
                )
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            finally:
                sys.stderr.write(Path(log.name).read_text("utf-8"))
