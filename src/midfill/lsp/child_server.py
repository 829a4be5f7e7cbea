"""ChildServer: ``midfill serve`` as a process of the language server's own.

A process of its own and not an engine in this one: the language server starts at once and imports
no torch, it answers while the model loads or computes, the engine's restarts and the cancellation
of abandoned requests are the server's as they are, and a crash ends nothing else.

Run as a program, this module is that process: ``midfill`` with the program's arguments. Standard
input is a pipe that the language server holds; when it closes, because the language server ended
or died, the process ends.
"""

import asyncio
import contextlib
import logging
import os
import re
import runpy
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable

from midfill.errors import MidfillError
from midfill.system.progress import STAGES_VARIABLE, Stage
from midfill.system.python_child import python_command, python_environment

_log = logging.getLogger("midfill.lsp.child_server")  # __name__ is "__main__" in the process

_URL = re.compile(r"listens +on (\S+)")
_STOP_SECONDS = 10.0  # between being asked to stop and being killed


class ChildServer:
    """A server of one model on a free port of this machine, with an API key that nobody else knows.

    Attributes:
        model: what it serves; None for the default model.
        api_key: the key that it wants.
    """

    def __init__(self, model: str | None, api_key: str, process: asyncio.subprocess.Process):
        self.model = model
        self.api_key = api_key
        self._process = process
        self._last_line = ""
        assert process.stderr is not None
        self._tasks = [asyncio.create_task(self._forward(process.stderr))]

    @classmethod
    async def start(cls, model: str | None) -> "ChildServer":
        """Start a process, which then loads the model.

        Raises:
            MidfillError: no process can be started.
        """
        key = secrets.token_urlsafe()
        arguments = ["serve", *([] if model is None else [model]), "--host", "127.0.0.1"]
        arguments += ["--log-level", "warning"]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *python_command("-m", "midfill.lsp.child_server", *arguments, "--port", "0"),
                stdin=pipe, stdout=pipe, stderr=pipe,
                env={**python_environment(), "MIDFILL_API_KEY": key, STAGES_VARIABLE: "1"},
            )  # fmt: skip
        except OSError as error:
            raise MidfillError(f"midfill serve can't be started: {error}") from error
        return cls(model, key, process)

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.returncode is None

    async def has_ended(self, seconds: float) -> bool:
        """Return whether the process has ended, or ends within some seconds."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def ready(self, on_stage: Callable[[Stage], None]) -> str:
        """Wait until the model is loaded; return the server's URL.

        Args:
            on_stage: called with what the process is doing.

        Raises:
            MidfillError: the process has ended; the message has its last line.
        """
        stdout = self._process.stdout
        assert stdout is not None
        async for line in _lines(stdout):
            if (stage := Stage.parse(line)) is not None:
                on_stage(stage)
            elif (found := _URL.search(line)) is not None:
                self._tasks.append(asyncio.create_task(_drain(stdout)))
                return found[1]
        status = await self._process.wait()
        await asyncio.wait(self._tasks)
        command = "midfill serve" if self.model is None else f"midfill serve {self.model}"
        raise MidfillError(f"{command}: {self._last_line or f'ended with status {status}'}")

    async def close(self) -> None:
        """End the process, by force if it takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await asyncio.wait(self._tasks)

    async def _forward(self, stderr: asyncio.StreamReader) -> None:
        """Log what the process says, and remember its last line."""
        async for line in _lines(stderr):
            if line:
                self._last_line = line.removeprefix("midfill: ")
                _log.warning("midfill serve: %s", line)


async def _drain(stream: asyncio.StreamReader) -> None:
    """Read what is of no interest, so that the writer never waits."""
    async for _ in _lines(stream):
        pass


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line that is longer than the stream's buffer
            continue
        if not line:
            return
        yield line.decode(errors="replace").strip()


def _end_with_parent() -> None:
    """Have this process end once its standard input closes."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="end with parent").start()


if __name__ == "__main__":
    _end_with_parent()
    runpy.run_module("midfill", run_name="__main__", alter_sys=True)
