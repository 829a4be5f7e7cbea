"""ServedModel: ``midfill serve`` in a process of its own, as its users and the system see it."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from midfill.errors import MidfillError

_PROC = Path("/proc")
_START_SECONDS = 300
_STOP_SECONDS = 30
_KEEP_ALIVE_SECONDS = 2  # less than the server's: a request on a connection that it closes fails
_ENGINE = b"midfill.engine.process.main"


@dataclass(frozen=True)
class ServedModel:
    """A server that answers.

    Attributes:
        url: where it listens.
        process_id: of the server.
        session: for requests to it.
        log: what it has logged.
    """

    url: str
    process_id: int
    session: aiohttp.ClientSession
    log: Path

    def engine_id(self) -> int | None:
        """Return the id of its engine's process; None while there is none."""
        for entry in _PROC.iterdir():
            if entry.name.isdigit() and _parent(entry) == self.process_id:
                with contextlib.suppress(OSError):
                    if _ENGINE in (entry / "cmdline").read_bytes():
                        return int(entry.name)
        return None

    async def is_ready(self) -> bool:
        """Whether it accepts requests."""
        async with self.session.get(f"{self.url}/readyz") as response:
            return response.status == 200

    async def remembered(self, kind: str) -> tuple[float, float]:
        """Return the bytes held of a kind of memory (``Planner.memory``), and their maximum."""
        text = await self._metrics_text()
        held, most = (
            re.search(rf'^midfill:{name}{{kind="{kind}"}} (\S+)$', text, re.MULTILINE)
            for name in ("remembered_bytes", "remembered_bytes_max")
        )
        assert held is not None
        assert most is not None
        return float(held[1]), float(most[1])

    async def metrics(self) -> dict[str, float]:
        """Return its metrics, summed over their labels, without ``midfill:``."""
        text = await self._metrics_text()
        values: dict[str, float] = {}
        for name, value in re.findall(r"^midfill:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            values[name] = values.get(name, 0.0) + float(value)
        return values

    async def _metrics_text(self) -> str:
        async with self.session.get(f"{self.url}/metrics") as response:
            return await response.text()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no request is in progress; return whether that was so in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    now = await self.metrics()
                    busy = ("running", "waiting", "background")
                    if not any(now[f"num_requests_{each}"] for each in busy):
                        return True
                    await asyncio.sleep(0.1)
        return False

    async def leaked_slots(self) -> int:
        """Return how many KV slots an idle engine counts as in use."""
        now = await self.metrics()
        return int(now["kv_slots"] - now["kv_slots_free"] - now["kv_slots_cached"])


def resident_bytes(process_id: int) -> int:
    """Return the memory that a process has resident; 0 if it has ended."""
    try:
        pages = (_PROC / str(process_id) / "statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def descriptors(process_id: int) -> int:
    """Return how many files and sockets a process has open; 0 if it has ended."""
    try:
        return len(os.listdir(_PROC / str(process_id) / "fd"))
    except OSError:
        return 0


@contextlib.asynccontextmanager
async def serve_model(model: str, options: Sequence[str]) -> AsyncIterator[ServedModel]:
    """Start a server on a free port, and end it with the block.

    Args:
        model: what to serve.
        options: further options of ``midfill serve``.

    Raises:
        MidfillError: it does not start, or the system has no /proc.
    """
    if not _PROC.is_dir():
        raise MidfillError("this benchmark finds processes in /proc, which only Linux has")
    command = [sys.executable, "-m", "midfill", "serve", model, "--port", "0", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
        try:
            url = await asyncio.wait_for(asyncio.to_thread(_url, process), _START_SECONDS)
            if url is None:
                last = log.read_text("utf-8", errors="replace").splitlines()[-8:]
                raise MidfillError("the server did not start:\n" + "\n".join(last))
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                yield ServedModel(url, process.pid, session, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()
            process.wait()


def _url(process: "subprocess.Popen[str]") -> str | None:
    """Read the server's banner; return its URL, None if it ended."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"listens  on (\S+)", line)
        if found is not None:
            return found[1]
    return None


def _parent(entry: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        return None if state in "ZX" else int(parent)
    return None
