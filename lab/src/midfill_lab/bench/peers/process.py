"""ServerProcess: a server in a session of its own, monitored while it runs and ended as a whole."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from midfill.errors import MidfillError
from midfill.system.python_child import python_environment

_WATCH_SECONDS = 0.2
_END_SECONDS = 10.0
_LOG_LINES = 8
_PROC = Path("/proc")


def free_port() -> int:
    """Return a port on which nothing listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """Starts a command as the leader of a session, by which its children are found.

    It is a context manager that leaves no process of the session behind, however it ends.

    Attributes:
        url: where it listens, without a path.
        peak_rss_bytes: peak of the memory resident in all its processes, sampled every 0.2 s; None
            if the system has no /proc. Pages that processes share count in each.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.peak_rss_bytes: int | None = None
        self._command = list(command)
        self._environment = python_environment({**os.environ, **environment})
        self._log = log
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ServerProcess":
        with self._log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise MidfillError(f"{self._command[0]} can't be run: {error.strerror}") from None
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while self._anything_left() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()

    @property
    def running(self) -> bool:
        """Whether the command itself still runs."""
        return self._process.poll() is None

    def log_text(self) -> str:
        """Return its output so far."""
        return self._log.read_text("utf-8", errors="replace")

    def last_words(self) -> str:
        """Return how it ended, if it did, and its last lines of output."""
        code = self._process.poll()
        state = "still running" if code is None else f"ended with {code}"
        lines = [line for line in self.log_text().splitlines() if line.strip()]
        said = "\n".join(lines[-_LOG_LINES:]) or "nothing"
        return f"{state}; it said last:\n{said}"

    def wait_until_ready(self, seconds: float) -> float:
        """Wait until GET /health answers 200 and return how many seconds that took.

        Raises:
            MidfillError: it ended, or did not answer in time.
        """
        started = time.monotonic()
        with httpx.Client(timeout=5.0) as client:
            while time.monotonic() - started < seconds:
                if not self.running:
                    raise MidfillError(f"it did not start: {self.last_words()}")
                with suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return time.monotonic() - started
                time.sleep(0.05)
        raise MidfillError(f"no answer within {seconds:.0f} s: {self.last_words()}")

    def wait_for_file(self, path: Path, seconds: float) -> None:
        """Wait until it has written a file, has ended, or the time is over."""
        started = time.monotonic()
        while self.running and not path.is_file() and time.monotonic() - started < seconds:
            time.sleep(0.05)

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._ended.is_set():
            resident = sum(_resident_pages(pid) for pid in session_processes(self._process.pid))
            if resident:
                self.peak_rss_bytes = max(self.peak_rss_bytes or 0, resident * page)
            self._ended.wait(_WATCH_SECONDS)

    def _anything_left(self) -> bool:
        if self.running:
            return True
        return bool(session_processes(self._process.pid))

    def _signal(self, number: signal.Signals) -> None:
        """Signal every process of the session; without /proc, the command's process group."""
        with suppress(ProcessLookupError):
            if not _PROC.is_dir():
                os.killpg(self._process.pid, number)
            for pid in session_processes(self._process.pid):
                os.kill(pid, number)


def session_processes(session: int) -> list[int]:
    """Return the ids of a session's running processes; none if the system has no /proc."""
    if not _PROC.is_dir():
        return []
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            # The name in parentheses may hold any character; then state, parent, group, session.
            state, _, _, its_session = _fields_after_name((entry / "stat").read_text())[:4]
            if int(its_session) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def _fields_after_name(stat: str) -> list[str]:
    return stat.rpartition(")")[2].split()


def _resident_pages(pid: int) -> int:
    with suppress(OSError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1])
    return 0
