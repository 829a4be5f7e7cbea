"""Sandbox: runs programs that a model wrote, with their tests, and returns which passed.

Every program gets a process and session of its own, an empty working folder, no environment, an
empty standard input, and limits on CPU time, memory, file size, open files and processes (the last
has no effect on root). Its output is discarded. It has passed if it ran to its end, tests
included: only then does it send back a random token that is new for each run. An exception
(SystemExit too), ``os._exit``, a signal or an exceeded limit is a failure. Nothing a program does
makes the caller wait longer than the wall time limit.

How a program is isolated from the rest of the machine depends on what the system permits:

namespaces (Linux, where unprivileged user namespaces are allowed)
    Guaranteed by the kernel, whatever the program calls, C libraries included. There is no
    network, not even loopback. Every file system is read-only except a private folder in memory.
    No other process can be seen or signalled. The program has no capabilities. When it ends or is
    killed, all processes that it started end too.
audit-hook (elsewhere)
    Guaranteed by Python: an audit hook refuses sockets, processes, ctypes, signals, and writing
    outside the folder. It stops what Python programs do by ordinary means, which is what models
    write, but not code made to get around it: system calls of an extension module are not seen.
    The kernel still enforces the limits, a user other than root can't start processes, and the
    program's process group is killed as a whole.

Files can be read in both. A program's output is discarded, and so is what it read.
"""

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self

from midfill.errors import MidfillError
from midfill.system.cores import available_threads
from midfill.system.progress import StageProgress

Isolation = Literal["namespaces", "audit-hook"]

_GRACE_SECONDS = 30.0  # for a worker to reply after the wall time limit, on a busy machine


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program.

    Attributes:
        cpu_seconds: CPU time of each of its processes.
        wall_seconds: time from start to end.
        memory_bytes: address space of each of its processes.
        file_bytes: size of each file it writes.
    """

    cpu_seconds: int = 4
    wall_seconds: float = 15.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 24


@dataclass(frozen=True)
class Verdict:
    """How one program ended.

    Attributes:
        passed: whether it ran to its end.
        reason: "passed", or why it failed.
    """

    passed: bool
    reason: str


class Sandbox:
    """A pool of workers that run programs; a context manager.

    Args:
        workers: number of programs run at the same time; None takes the available cores.
        limits: of each program.
        isolation: the required kind; None takes the best that the system permits.

    Raises:
        MidfillError: the system can't run programs, or not with this isolation.

    Attributes:
        isolation: the kind in use.
    """

    def __init__(
        self,
        workers: int | None = None,
        limits: Limits | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        if os.name != "posix":
            raise MidfillError("running programs needs Linux or macOS; pass@1 can't be measured")
        self._limits = limits or Limits()
        self._folder = tempfile.mkdtemp(prefix="midfill-sandbox-")
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        try:
            for _ in range(workers or available_threads()):
                self._workers.append(_Worker(isolation or "auto", self._folder))
                self._idle.put(self._workers[-1])
        except BaseException:
            self.close()
            raise
        self.isolation: Isolation = self._workers[0].isolation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and their programs."""
        for worker in self._workers:
            worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, programs: Sequence[str], progress: StageProgress | None = None) -> list[Verdict]:
        """Run programs in parallel, one per worker.

        Args:
            programs: Python sources.
            progress: called with (done, total).

        Returns:
            One verdict per program, in order.

        Raises:
            MidfillError: the sandbox itself failed.
        """
        pool = ThreadPoolExecutor(len(self._workers))
        try:
            futures = [pool.submit(self._run, program) for program in programs]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if progress is not None:
                    progress(done, len(programs))
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, program: str) -> Verdict:
        worker = self._idle.get()
        try:
            return worker.run(program, self._limits)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process of ``sandbox_worker.py``, restarted if it is lost."""

    def __init__(self, mode: str, folder: str) -> None:
        script = Path(__file__).with_name("sandbox_worker.py")
        self._command = [sys.executable, "-BPSs", str(script), mode, folder]
        self._start()

    def run(self, program: str, limits: Limits) -> Verdict:
        job = {"source": program, "token": secrets.token_hex(16), **asdict(limits)}
        reply = self._ask(job, limits.wall_seconds + _GRACE_SECONDS)
        if reply is None:
            self.close()
            self._start()
            return Verdict(False, "killed with its worker")
        if "error" in reply:
            raise MidfillError(f"the sandbox failed: {reply['error']}")
        return Verdict(reply["passed"], reply["reason"])

    def close(self) -> None:
        """Kill the process; the kernel then kills the program it runs."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _start(self) -> None:
        # PYTHONHASHSEED makes programs deterministic.
        environment = {"PYTHONHASHSEED": "0"}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        hello = self._read(_GRACE_SECONDS)
        if hello is None or "error" in hello:
            self.close()
            why = (hello or {}).get("error", "its worker doesn't start")
            raise MidfillError(f"the sandbox can't be used here: {why}")
        self.isolation: Isolation = hello["isolation"]

    def _ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return the reply to a job, None if the worker is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        return json.loads(line) if line.endswith(b"\n") else None
