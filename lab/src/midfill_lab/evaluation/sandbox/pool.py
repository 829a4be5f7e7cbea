"""The pool of workers that a sandbox runs programs on."""

import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Self

import midfill_lab
from midfill.errors import MidfillError
from midfill.system.machine import available_threads
from midfill.system.progress import StageProgress
from midfill.system.python_child import python_command
from midfill_lab.evaluation.sandbox.values import FrameError, read_frame, write_frame

Isolation = Literal["namespaces", "audit-hook"]

_GRACE_SECONDS = 30.0  # for a worker to reply after the wall time limit, on a busy machine


_SOURCES = Path(midfill_lab.__file__).parents[1]

# The bare interpreter finds the worker, and nothing else of midfill is imported.
_START = """
import sys
sys.path.append(sys.argv[1])
from midfill_lab.evaluation.sandbox.worker import main
del sys.path[-1]
main(*sys.argv[2:])
"""


@dataclass(frozen=True)
class Program:
    """A program and its tests.

    Attributes:
        source: the untrusted program.
        entry_point: name of the function that is tested.
        test: trusted source that defines ``check``, which takes the function and raises if it is
            wrong.
        reference: trusted source that is executed before ``test`` and defines what it needs.
    """

    source: str
    entry_point: str
    test: str
    reference: str = ""


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
        passed: whether its tests ran to their end.
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
            self.isolation: Isolation = self._add_first_worker(isolation)
            for _ in range(1, workers or available_threads()):
                self._add_worker(self.isolation)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and their programs."""
        for worker in self._workers:
            worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self, programs: Sequence[Program], progress: StageProgress | None = None
    ) -> list[Verdict]:
        """Run programs in parallel, one per worker.

        Args:
            programs: what to run.
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

    def _add_first_worker(self, isolation: Isolation | None) -> Isolation:
        """Start a worker with the given isolation, else with the best one; return which."""
        try:
            return self._add_worker(isolation or "namespaces")
        except MidfillError:
            if isolation is not None:
                raise
            return self._add_worker("audit-hook")

    def _add_worker(self, isolation: Isolation) -> Isolation:
        self._workers.append(_Worker(isolation, self._folder))
        self._idle.put(self._workers[-1])
        return isolation

    def _run(self, program: Program) -> Verdict:
        worker = self._idle.get()
        try:
            return worker.run(program, self._limits)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process of ``worker.py``, restarted if it is lost."""

    def __init__(self, isolation: Isolation, folder: str) -> None:
        self.isolation = isolation
        self._folder = folder
        self._start()

    def run(self, program: Program, limits: Limits) -> Verdict:
        job = {"source": program.source, "entry_point": program.entry_point, **asdict(limits)}
        tests = {"reference": program.reference, "test": program.test}
        reply = self._ask(job, tests, limits.wall_seconds + _GRACE_SECONDS)
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
        os.close(self._tests)
        self._process.communicate()

    def _start(self) -> None:
        # PYTHONHASHSEED makes programs deterministic.
        environment = {"PYTHONHASHSEED": "0"}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        tests, self._tests = os.pipe()
        arguments = [self.isolation, self._folder, str(tests)]
        try:
            self._process = subprocess.Popen(
                python_command("-BSs", "-c", _START, str(_SOURCES), *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                pass_fds=(tests,),
            )
        finally:
            os.close(tests)
        hello = self._read(_GRACE_SECONDS)
        if hello is None or "error" in hello:
            self.close()
            why = (hello or {}).get("error", "its worker doesn't start")
            raise MidfillError(f"the sandbox can't be used here: {why}")

    def _ask(
        self, job: dict[str, Any], tests: dict[str, str], seconds: float
    ) -> dict[str, Any] | None:
        """Return the reply to a job, None if the worker is gone."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin.fileno(), job)
            write_frame(self._tests, tests)
        except FrameError:
            return None
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        try:
            return dict(read_frame(self._process.stdout.fileno())) if ready else None
        except FrameError:
            return None
